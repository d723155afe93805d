"""What a sync does to the state: capture, reduce, outer step, merge [Streaming]."""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax.types import IntScalar
from haliax.util import is_named_array
from jaxtyping import Array, Bool, Float, PyTree

from ..algorithm.moments import fresh_moments
from ..algorithm.outer import island_gradients, merge, norm, outer_step
from ..axes import ISLAND, Params, broadcast, island_axis
from ..fragments.partition import Partition, Place, put_fragment, take_fragment
from .all_reduce import Exchange, Exchanged
from .placement import Placement
from .state import DiLoCoState, Islands

LEFT_OUT, SEEDED = -1.0, -2.0
"""Weights of an island that the guard leaves out, before and after it has started anew."""


class SyncReport(NamedTuple):
    """Figures of one fragment's outer step."""

    island_distance: PyTree[Float[Array, " K"]]
    """`|Delta_k|`: how far each island had moved from Theta at the capture. Stays on its island."""

    outer_grad_norm: PyTree[Float[Array, ""]]
    outer_update_norm: PyTree[Float[Array, ""]]
    weights: PyTree[Float[Array, " K"]]
    """Of all islands, as they were in the mean: 0 for one that was absent, `LEFT_OUT` or `SEEDED` for one that the
    guard left out."""


class Guard(NamedTuple):
    """Leaves an island out of a sync whose outer gradient could spoil the mean."""

    enabled: bool
    """Whether it is left out for a loss or an outer gradient that is not finite."""

    factor: float | None
    """And for a norm of more than this multiple of the median of those that take part."""


@dataclass(frozen=True)
class Sync:
    """The verbs of a sync, as pure functions of the state; the index of a fragment's place may be traced.

    `weights` are those that the options give each island, `[K]`, 0 for one that is absent.
    """

    partition: Partition
    optimizer: optax.GradientTransformation
    mixing_alpha: float
    exchange: Exchange
    placement: Placement
    inner_optimizer: optax.GradientTransformation
    guard: Guard

    def watch(self, islands: Islands, losses: Float[Array, " K"]) -> Islands:
        """Notes which islands had a loss that is not finite."""
        if not self.guard.enabled:
            return islands
        return dataclasses.replace(islands, failed=jnp.where(jnp.isfinite(losses), islands.failed, 1))

    def capture(self, state: DiLoCoState, place: Place) -> Params:
        """Returns `Delta_k` of one fragment, axes `{diloco, ...}`, f32, each on its own island."""
        islands = self.partition.take(state.islands.params, *place)
        return island_gradients(self.partition.take(state.theta, *place), islands)

    def keep(self, state: DiLoCoState, place: Place, weights: Float[Array, " K"]) -> DiLoCoState:
        """Captures one fragment into the state, from where later steps exchange it (V >= 1)."""
        gradients = self.capture(state, place)
        state = self._weigh(state, place, self._sound(state, gradients, weights))
        return dataclasses.replace(state, captured={**(state.captured or {}), place.part: gradients})

    def reduce(
        self,
        state: DiLoCoState,
        place: Place,
        gradients: Params,
        weights: Float[Array, " K"],
        piece: IntScalar | None = None,
    ) -> Exchanged:
        """Returns `Delta`, axes `{...}`, f32, as far as it has crossed. The one exchange between islands.

        Without a piece all of it crosses at once.
        """
        weights = self._limited(gradients, weights)
        # A key of its own for each exchange, the same again after a resume.
        key = jax.random.fold_in(jax.random.fold_in(state.training_key, state.step), self.partition.number(place))
        residual = None if state.residual is None else self.partition.take(state.residual, *place)
        if piece is None:
            return dataclasses.replace(self.exchange, num_pieces=1).mean(gradients, weights, key, residual=residual)
        so_far = None if state.crossed is None else state.crossed[place.part]
        return self.exchange.mean(gradients, weights, key, piece, so_far, residual)

    def reduce_kept(self, state: DiLoCoState, place: Place, piece: IntScalar) -> Exchanged:
        """Reduces one piece of the fragment that `keep` captured."""
        weights = state.islands.weights[:, self.partition.number(place)]
        return self.reduce(state, place, self._kept(state, place), weights, piece)

    def arrive(
        self, state: DiLoCoState, place: Place, exchanged: Exchanged, last: bool
    ) -> tuple[DiLoCoState, SyncReport | None]:
        """Takes in what `reduce_kept` returned; with the last piece the fragment takes its outer step."""
        state = self._remember(state, place, exchanged.residual)
        if not last:
            return dataclasses.replace(state, crossed={**(state.crossed or {}), place.part: exchanged.mean}), None
        state, _, report = self._outer_step(state, place, self._kept(state, place), exchanged)
        return state, report

    def cross(
        self, state: DiLoCoState, place: Place, piece: IntScalar, last: bool
    ) -> tuple[DiLoCoState, SyncReport | None]:
        """`reduce_kept` and `arrive` at once, apart from an inner step."""
        return self.arrive(state, place, self.reduce_kept(state, place, piece), last)

    def merge(self, state: DiLoCoState, place: Place) -> DiLoCoState:
        """Lets every island take up Theta of one fragment."""
        return self._merge(state, place, self.partition.take(state.theta, *place))

    def whole(self, state: DiLoCoState, place: Place, weights: Float[Array, " K"]) -> tuple[DiLoCoState, SyncReport]:
        """A sync without overlap: capture, reduce, outer step and merge of one fragment at once."""
        gradients = self.capture(state, place)
        exchanged = self.reduce(state, place, gradients, self._sound(state, gradients, weights))
        state = self._remember(state, place, exchanged.residual)
        state, after, report = self._outer_step(state, place, gradients, exchanged)
        return self._merge(state, place, after), report

    def seed(
        self, state: DiLoCoState, chosen: Bool[Array, " K"], active: IntScalar, copied: bool = False
    ) -> DiLoCoState:
        """Lets the chosen islands start anew from Theta, at the present place of the learning-rate schedule.

        Args:
            state: The state.
            chosen: Which islands.
            active: How many islands train from now on.
            copied: Whether they take the inner moments of island 0; else these are fresh.
        """
        islands = state.islands
        Island = island_axis(islands.params)
        theta = state.theta_of_islands
        if copied:
            moments = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), islands.opt_state)
        else:
            moments = fresh_moments(broadcast(self.inner_optimizer.init(theta), Island), islands.opt_state)
        residual = None if state.residual is None else jax.tree.map(jnp.zeros_like, state.residual)
        # What was captured of an island before it was found to be broken counts no more.
        broken = chosen & (islands.weights == LEFT_OUT).any(axis=1)

        def pick[T: PyTree](new: T, old: T) -> T:
            return jax.tree.map(lambda x, y: jnp.where(jnp.expand_dims(chosen, range(1, y.ndim)), x, y), new, old)

        islands = Islands(
            params=pick(broadcast(theta, Island), islands.params),
            opt_state=pick(moments, islands.opt_state),
            key=islands.key,
            failed=jnp.where(chosen, 0, islands.failed),
            weights=jnp.where(broken[:, None] & (islands.weights != 0), SEEDED, islands.weights),
        )
        return dataclasses.replace(
            state, islands=islands, residual=pick(residual, state.residual), active=jnp.asarray(active, jnp.int32)
        )

    def settle(self, state: DiLoCoState) -> DiLoCoState:
        """Notes that no capture up to this step has an event left."""
        return dataclasses.replace(state, settled=jnp.copy(state.step).astype(jnp.int32))

    def _sound(self, state: DiLoCoState, gradients: Params, weights: Float[Array, " K"]) -> Float[Array, " K"]:
        """The weights of the islands, less those of which the guard knows a number that is not finite."""
        if not self.guard.enabled:
            return jnp.asarray(weights)
        sound = jnp.isfinite(norm(gradients, island_axis(gradients))) & (state.islands.failed == 0)
        return jnp.where(sound, weights, LEFT_OUT)

    def _limited(self, gradients: Params, weights: Float[Array, " K"]) -> Float[Array, " K"]:
        """The weights, less those of islands whose outer gradient is too long for the guard."""
        if self.guard.factor is None:
            return weights
        norms = norm(gradients, island_axis(gradients))
        limit = self.guard.factor * jnp.nanmedian(jnp.where(weights > 0, norms, jnp.nan))
        return jnp.where((weights > 0) & (norms > limit), LEFT_OUT, weights)

    def _weigh(self, state: DiLoCoState, place: Place, weights: Float[Array, " K"]) -> DiLoCoState:
        kept = state.islands.weights.at[:, self.partition.number(place)].set(weights)
        return dataclasses.replace(state, islands=dataclasses.replace(state.islands, weights=kept))

    def _outer_step(
        self, state: DiLoCoState, place: Place, gradients: Params, exchanged: Exchanged
    ) -> tuple[DiLoCoState, Params, SyncReport]:
        """Takes the outer step of one fragment; with no island in the mean, Theta and its optimizer state stay.

        Also returns the new Theta of the fragment: read back from the state, it would cost a copy of the stack.
        """
        gradient, weights = exchanged.mean, exchanged.weights
        taken = (weights > 0).any()
        outer = state.theta
        before = self.partition.take(outer, *place)
        moments = state.opt_state[place.part]
        current = self.placement.own(before), take_fragment(moments, place.index)
        stepped = outer_step(self.optimizer, current[1], current[0], gradient)
        own, mine = jax.tree.map(lambda new, old: jnp.where(taken, new, old), stepped, current)
        after = self.placement.whole(own)
        model = eqx.combine(self.partition.put(outer, *place, after), state.model)
        opt_state = {**state.opt_state, place.part: put_fragment(moments, place.index, mine)}
        counts = state.outer_steps.at[self.partition.number(place)].add(taken.astype(jnp.int32))
        moved = jax.tree.map(lambda new, old: new - old, after, before, is_leaf=is_named_array)
        report = SyncReport(norm(gradients, island_axis(gradients)), norm(gradient), norm(moved), weights)
        state = dataclasses.replace(state, model=model, opt_state=opt_state, outer_steps=counts)
        return self._weigh(state, place, weights), after, report

    def _merge(self, state: DiLoCoState, place: Place, outer: Params) -> DiLoCoState:
        params = state.islands.params
        present = hax.named(state.islands.weights[:, self.partition.number(place)] > 0, ISLAND)
        merged = merge(outer, self.partition.take(params, *place), self.mixing_alpha, present)
        islands = dataclasses.replace(state.islands, params=self.partition.put(params, *place, merged))
        return dataclasses.replace(state, islands=islands)

    def _remember(self, state: DiLoCoState, place: Place, residual: Params | None) -> DiLoCoState:
        if residual is None:
            return state
        return dataclasses.replace(state, residual=self.partition.put(state.residual, *place, residual))

    @staticmethod
    def _kept(state: DiLoCoState, place: Place) -> Params:
        assert state.captured is not None  # V >= 1
        return state.captured[place.part]
