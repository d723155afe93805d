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
from jaxtyping import Array, Bool, Float, Int8, PyTree

from ..algorithm.moments import fresh_moments
from ..algorithm.outer import island_gradients, merge, norm, outer_step
from ..axes import ISLAND, Params, broadcast, island_axis
from ..fragments.partition import Partition, Place, put_fragment, take_fragment
from .all_reduce import Exchange, Exchanged
from .byte_count import Words, added, words_of
from .placement import Placement
from .state import DiLoCoState, Islands, Status


class Attendance(NamedTuple):
    """Which islands are in the mean of a sync, with which weight, and what became of the others."""

    weights: Float[Array, " K"]
    """0 for one that is not in it."""

    status: Int8[Array, " K"]

    @classmethod
    def of_message(cls, message: Float[Array, " K"]) -> "Attendance":
        """Reads what `message` says."""
        return cls(jnp.maximum(message, 0), jnp.maximum(-message, 0).astype(jnp.int8))

    @property
    def message(self) -> Float[Array, " K"]:
        """Both as one number an island, which joins a fragment on the wire: a weight, or minus a status."""
        return jnp.where(self.status == Status.COUNTED.value, self.weights, -self.status.astype(jnp.float32))

    def without(self, islands: Bool[Array, " K"]) -> "Attendance":
        """Leaves some islands out."""
        left_out = jnp.int8(Status.LEFT_OUT.value)
        return Attendance(jnp.where(islands, 0, self.weights), jnp.where(islands, left_out, self.status))


class SyncReport(NamedTuple):
    """Figures of one fragment's outer step."""

    island_distance: PyTree[Float[Array, " K"]]
    """`|Delta_k|`: how far each island had moved from Theta at the capture. Stays on its island."""

    outer_grad_norm: PyTree[Float[Array, ""]]
    outer_update_norm: PyTree[Float[Array, ""]]
    attendance: PyTree[Attendance]
    """Of all islands."""

    sent_bytes: PyTree[Words]
    """What each island has sent for it."""


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

    def payload_bytes(self, gradients: Params) -> int:
        """Bytes that an island sends for one sync of a fragment: one that is alone sends nothing."""
        return self.exchange.payload_bytes(gradients) if island_axis(gradients).size > 1 else 0

    def capture(self, state: DiLoCoState, place: Place) -> Params:
        """Returns `Delta_k` of one fragment, axes `{diloco, ...}`, f32, each on its own island."""
        islands = self.partition.take(state.islands.params, *place)
        return island_gradients(self.partition.take(state.theta, *place), islands)

    def keep(self, state: DiLoCoState, place: Place, weights: Float[Array, " K"]) -> DiLoCoState:
        """Captures one fragment into the state, from where later steps exchange it (V >= 1)."""
        gradients = self.capture(state, place)
        state = self._note(state, place, self._sound(state, gradients, weights))
        return dataclasses.replace(state, captured={**(state.captured or {}), place.part: gradients})

    def reduce(
        self,
        state: DiLoCoState,
        place: Place,
        gradients: Params,
        attendance: Attendance,
        piece: IntScalar | None = None,
    ) -> Exchanged:
        """Returns `Delta`, axes `{...}`, f32, as far as it has crossed. The one exchange between islands.

        Without a piece all of it crosses at once.
        """
        message = self._limited(gradients, attendance).message
        # A key of its own for each exchange, the same again after a resume.
        key = jax.random.fold_in(jax.random.fold_in(state.training_key, state.step), self.partition.number(place))
        residual = None if state.residual is None else self.partition.take(state.residual, *place)
        if piece is None:
            return dataclasses.replace(self.exchange, num_pieces=1).mean(gradients, message, key, residual=residual)
        so_far = None if state.crossed is None else state.crossed[place.part]
        return self.exchange.mean(gradients, message, key, piece, so_far, residual)

    def reduce_kept(self, state: DiLoCoState, place: Place, piece: IntScalar) -> Exchanged:
        """Reduces one piece of the fragment that `keep` captured."""
        attendance = self._attendance(state, place)
        return self.reduce(state, place, self._kept(state, place), attendance, piece)

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
        broken = chosen & (islands.status == Status.LEFT_OUT.value).any(axis=1)
        void = broken[:, None] & ((islands.weights > 0) | (islands.status != Status.COUNTED.value))

        def pick[T: PyTree](new: T, old: T) -> T:
            return jax.tree.map(lambda x, y: jnp.where(jnp.expand_dims(chosen, range(1, y.ndim)), x, y), new, old)

        islands = Islands(
            params=pick(broadcast(theta, Island), islands.params),
            opt_state=pick(moments, islands.opt_state),
            key=islands.key,
            failed=jnp.where(chosen, 0, islands.failed),
            weights=jnp.where(void, 0, islands.weights),
            status=jnp.where(void, jnp.int8(Status.RESTARTED.value), islands.status),
        )
        return dataclasses.replace(
            state, islands=islands, residual=pick(residual, state.residual), active=jnp.asarray(active, jnp.int32)
        )

    def settle(self, state: DiLoCoState) -> DiLoCoState:
        """Notes that no capture up to this step has an event left."""
        return dataclasses.replace(state, settled=jnp.copy(state.step).astype(jnp.int32))

    def _sound(self, state: DiLoCoState, gradients: Params, weights: Float[Array, " K"]) -> Attendance:
        """Who attends by the options, less those of which the guard knows a number that is not finite."""
        weights = jnp.asarray(weights)
        attendance = Attendance(weights, jnp.full(weights.shape, Status.COUNTED.value, jnp.int8))
        if not self.guard.enabled:
            return attendance
        sound = jnp.isfinite(norm(gradients, island_axis(gradients))) & (state.islands.failed == 0)
        # One that does not train is not left out: nothing of it is wanted, whatever its numbers are.
        return attendance.without(~sound & (jnp.arange(len(weights)) < state.active))

    def _limited(self, gradients: Params, attendance: Attendance) -> Attendance:
        """Who attends, less those whose outer gradient is too long for the guard."""
        if self.guard.factor is None:
            return attendance
        norms, there = norm(gradients, island_axis(gradients)), attendance.weights > 0
        limit = self.guard.factor * jnp.nanmedian(jnp.where(there, norms, jnp.nan))
        return attendance.without(there & (norms > limit))

    def _attendance(self, state: DiLoCoState, place: Place) -> Attendance:
        """Of the last capture of a fragment."""
        fragment = self.partition.number(place)
        return Attendance(state.islands.weights[:, fragment], state.islands.status[:, fragment])

    def _note(self, state: DiLoCoState, place: Place, attendance: Attendance) -> DiLoCoState:
        fragment, islands = self.partition.number(place), state.islands
        weights = islands.weights.at[:, fragment].set(attendance.weights)
        status = islands.status.at[:, fragment].set(attendance.status)
        return dataclasses.replace(state, islands=dataclasses.replace(islands, weights=weights, status=status))

    def _outer_step(
        self, state: DiLoCoState, place: Place, gradients: Params, exchanged: Exchanged
    ) -> tuple[DiLoCoState, Params, SyncReport]:
        """Takes the outer step of one fragment; with no island in the mean, Theta and its optimizer state stay.

        Also returns the new Theta of the fragment: read back from the state, it would cost a copy of the stack.
        """
        gradient, attendance = exchanged.mean, Attendance.of_message(exchanged.weights)
        taken = (attendance.weights > 0).any()
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
        sent = words_of(self.payload_bytes(gradients))
        distance = norm(gradients, island_axis(gradients))
        report = SyncReport(distance, norm(gradient), norm(moved), attendance, sent)
        sent = added(state.sent_bytes, sent)
        state = dataclasses.replace(state, model=model, opt_state=opt_state, outer_steps=counts, sent_bytes=sent)
        return self._note(state, place, attendance), after, report

    def _merge(self, state: DiLoCoState, place: Place, outer: Params) -> DiLoCoState:
        params = state.islands.params
        present = hax.named(self._attendance(state, place).weights > 0, ISLAND)
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
