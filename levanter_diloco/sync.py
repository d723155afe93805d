"""What a sync does to the state: capture, reduce, outer step, merge [Streaming]."""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from haliax.partitioning import ResourceMapping
from haliax.types import IntScalar
from haliax.util import is_named_array
from jax.sharding import Mesh
from jaxtyping import Array, Float, PyTree
from levanter.trainer_state import trainables_only

from .exchange import mean_over_islands
from .fragments import Params, Partition, put_fragment, take_fragment
from .outer import ISLAND, island_gradients, merge, norm, outer_step
from .state import LAYERS, REST, DiLoCoState


class SyncReport(NamedTuple):
    """Figures of one fragment's outer step."""

    island_distance: PyTree[Float[Array, " K"]]
    """`|Delta_k|`: how far each island had moved from Theta at the capture. Stays on its island."""

    outer_grad_norm: PyTree[Float[Array, ""]]
    outer_update_norm: PyTree[Float[Array, ""]]


@dataclass(frozen=True)
class Sync:
    """The four verbs of a sync, as pure functions of the state.

    `index` is `None` for fragment 0 and the traced number of a layer fragment minus one otherwise.
    """

    partition: Partition
    optimizer: optax.GradientTransformation
    mixing_alpha: float
    mesh: Mesh
    mapping: ResourceMapping

    def capture(self, state: DiLoCoState, index: IntScalar | None) -> Params:
        """Returns `Delta_k` of one fragment, axes `{diloco, ...}`, f32, each on its own island."""
        islands = self.partition.take(state.islands.params, index)
        return island_gradients(self.partition.take(self._outer(state), index), islands)

    def reduce(self, gradients: Params) -> Params:
        """Returns `Delta`, axes `{...}`, f32. The one exchange between islands."""
        return mean_over_islands(gradients, self.mesh, self.mapping)

    def merge(self, state: DiLoCoState, index: IntScalar | None) -> DiLoCoState:
        """Lets every island take up Theta of one fragment."""
        return self._merge(state, index, self.partition.take(self._outer(state), index))

    def keep(self, state: DiLoCoState, index: IntScalar | None) -> DiLoCoState:
        """Captures one fragment into the state, for an outer step in a later program (V >= 1)."""
        part = _part(index)
        return dataclasses.replace(state, captured={**(state.captured or {}), part: self.capture(state, index)})

    def outer_step(
        self, state: DiLoCoState, index: IntScalar | None, gradients: Params, gradient: Params
    ) -> tuple[DiLoCoState, SyncReport]:
        """Steps one fragment of Theta by `gradient`, the mean of `gradients`."""
        state, _, report = self._outer_step(state, index, gradients, gradient)
        return state, report

    def reduce_kept(self, state: DiLoCoState, index: IntScalar | None) -> tuple[DiLoCoState, SyncReport]:
        """Reduces the fragment that `keep` captured and steps Theta."""
        assert state.captured is not None  # V >= 1
        gradients = state.captured[_part(index)]
        return self.outer_step(state, index, gradients, self.reduce(gradients))

    def whole(self, state: DiLoCoState, index: IntScalar | None) -> tuple[DiLoCoState, SyncReport]:
        """A sync without overlap: capture, reduce, outer step and merge of one fragment at once."""
        gradients = self.capture(state, index)
        state, after, report = self._outer_step(state, index, gradients, self.reduce(gradients))
        return self._merge(state, index, after), report

    def settle(self, state: DiLoCoState, index: IntScalar | None) -> DiLoCoState:
        """Notes that no capture up to this step has an event left; `index` is not used."""
        del index
        return dataclasses.replace(state, settled=jnp.copy(state.step).astype(jnp.int32))

    def _outer_step(
        self, state: DiLoCoState, index: IntScalar | None, gradients: Params, gradient: Params
    ) -> tuple[DiLoCoState, Params, SyncReport]:
        """Also returns the new Theta of the fragment: read back from the state, it would cost a copy of the stack."""
        outer = self._outer(state)
        part = _part(index)
        before = self.partition.take(outer, index)
        moments = state.opt_state[part]
        mine = moments if index is None else take_fragment(moments, index)
        after, mine = outer_step(self.optimizer, mine, before, gradient)
        model = eqx.combine(self.partition.put(outer, index, after), state.model)
        opt_state = {**state.opt_state, part: mine if index is None else put_fragment(moments, index, mine)}
        counts = state.outer_steps.at[0 if index is None else index + 1].add(1)
        Island = jax.tree.leaves(gradients, is_leaf=is_named_array)[0].resolve_axis(ISLAND)
        moved = jax.tree.map(lambda new, old: new - old, after, before, is_leaf=is_named_array)
        report = SyncReport(norm(gradients, Island), norm(gradient), norm(moved))
        return dataclasses.replace(state, model=model, opt_state=opt_state, outer_steps=counts), after, report

    def _merge(self, state: DiLoCoState, index: IntScalar | None, outer: Params) -> DiLoCoState:
        params = state.islands.params
        merged = merge(outer, self.partition.take(params, index), self.mixing_alpha)
        islands = dataclasses.replace(state.islands, params=self.partition.put(params, index, merged))
        return dataclasses.replace(state, islands=islands)

    @staticmethod
    def _outer(state: DiLoCoState) -> Params:
        return trainables_only(state.model, state.is_trainable)


def _part(index: IntScalar | None) -> str:
    """The part of `captured` and `opt_state` that holds a fragment."""
    return REST if index is None else LAYERS
