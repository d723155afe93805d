"""What a sync does to the state: capture, reduce, outer step, merge [Streaming]."""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from haliax.types import IntScalar
from haliax.util import is_named_array
from jaxtyping import Array, Float, PyTree
from levanter.trainer_state import trainables_only

from .exchange import Exchange, Exchanged
from .fragments import Params, Partition, Place, put_fragment, take_fragment
from .outer import ISLAND, island_gradients, merge, norm, outer_step
from .placement import Placement
from .state import DiLoCoState


class SyncReport(NamedTuple):
    """Figures of one fragment's outer step."""

    island_distance: PyTree[Float[Array, " K"]]
    """`|Delta_k|`: how far each island had moved from Theta at the capture. Stays on its island."""

    outer_grad_norm: PyTree[Float[Array, ""]]
    outer_update_norm: PyTree[Float[Array, ""]]


@dataclass(frozen=True)
class Sync:
    """The verbs of a sync, as pure functions of the state; the index of a fragment's place may be traced."""

    partition: Partition
    optimizer: optax.GradientTransformation
    mixing_alpha: float
    exchange: Exchange
    placement: Placement

    def capture(self, state: DiLoCoState, place: Place) -> Params:
        """Returns `Delta_k` of one fragment, axes `{diloco, ...}`, f32, each on its own island."""
        islands = self.partition.take(state.islands.params, *place)
        return island_gradients(self.partition.take(self._outer(state), *place), islands)

    def keep(self, state: DiLoCoState, place: Place) -> DiLoCoState:
        """Captures one fragment into the state, from where later steps exchange it (V >= 1)."""
        return dataclasses.replace(state, captured={**(state.captured or {}), place.part: self.capture(state, place)})

    def reduce(self, state: DiLoCoState, place: Place, gradients: Params, piece: IntScalar | None = None) -> Exchanged:
        """Returns `Delta`, axes `{...}`, f32, as far as it has crossed. The one exchange between islands.

        Without a piece all of it crosses at once.
        """
        # A key of its own for each exchange, the same again after a resume.
        key = jax.random.fold_in(jax.random.fold_in(state.training_key, state.step), self.partition.number(place))
        residual = None if state.residual is None else self.partition.take(state.residual, *place)
        if piece is None:
            return dataclasses.replace(self.exchange, num_pieces=1).mean(gradients, key, residual=residual)
        so_far = None if state.crossed is None else state.crossed[place.part]
        return self.exchange.mean(gradients, key, piece, so_far, residual)

    def reduce_kept(self, state: DiLoCoState, place: Place, piece: IntScalar) -> Exchanged:
        """Reduces one piece of the fragment that `keep` captured."""
        return self.reduce(state, place, self._kept(state, place), piece)

    def arrive(
        self, state: DiLoCoState, place: Place, exchanged: Exchanged, last: bool
    ) -> tuple[DiLoCoState, SyncReport | None]:
        """Takes in what `reduce_kept` returned; with the last piece the fragment takes its outer step."""
        state = self._remember(state, place, exchanged.residual)
        if not last:
            return dataclasses.replace(state, crossed={**(state.crossed or {}), place.part: exchanged.mean}), None
        state, _, report = self._outer_step(state, place, self._kept(state, place), exchanged.mean)
        return state, report

    def cross(
        self, state: DiLoCoState, place: Place, piece: IntScalar, last: bool
    ) -> tuple[DiLoCoState, SyncReport | None]:
        """`reduce_kept` and `arrive` at once, apart from an inner step."""
        return self.arrive(state, place, self.reduce_kept(state, place, piece), last)

    def merge(self, state: DiLoCoState, place: Place) -> DiLoCoState:
        """Lets every island take up Theta of one fragment."""
        return self._merge(state, place, self.partition.take(self._outer(state), *place))

    def whole(self, state: DiLoCoState, place: Place) -> tuple[DiLoCoState, SyncReport]:
        """A sync without overlap: capture, reduce, outer step and merge of one fragment at once."""
        gradients = self.capture(state, place)
        exchanged = self.reduce(state, place, gradients)
        state = self._remember(state, place, exchanged.residual)
        state, after, report = self._outer_step(state, place, gradients, exchanged.mean)
        return self._merge(state, place, after), report

    def settle(self, state: DiLoCoState) -> DiLoCoState:
        """Notes that no capture up to this step has an event left."""
        return dataclasses.replace(state, settled=jnp.copy(state.step).astype(jnp.int32))

    def _outer_step(
        self, state: DiLoCoState, place: Place, gradients: Params, gradient: Params
    ) -> tuple[DiLoCoState, Params, SyncReport]:
        """Also returns the new Theta of the fragment: read back from the state, it would cost a copy of the stack."""
        outer = self._outer(state)
        before = self.partition.take(outer, *place)
        moments = state.opt_state[place.part]
        own = self.placement.own(before)
        own, mine = outer_step(self.optimizer, take_fragment(moments, place.index), own, gradient)
        after = self.placement.whole(own)
        model = eqx.combine(self.partition.put(outer, *place, after), state.model)
        opt_state = {**state.opt_state, place.part: put_fragment(moments, place.index, mine)}
        counts = state.outer_steps.at[self.partition.number(place)].add(1)
        Island = jax.tree.leaves(gradients, is_leaf=is_named_array)[0].resolve_axis(ISLAND)
        moved = jax.tree.map(lambda new, old: new - old, after, before, is_leaf=is_named_array)
        report = SyncReport(norm(gradients, Island), norm(gradient), norm(moved))
        return dataclasses.replace(state, model=model, opt_state=opt_state, outer_steps=counts), after, report

    def _merge(self, state: DiLoCoState, place: Place, outer: Params) -> DiLoCoState:
        params = state.islands.params
        merged = merge(outer, self.partition.take(params, *place), self.mixing_alpha)
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

    @staticmethod
    def _outer(state: DiLoCoState) -> Params:
        return trainables_only(state.model, state.is_trainable)
