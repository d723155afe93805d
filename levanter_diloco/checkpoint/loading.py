"""The first state of a run (fresh, resumed, or from a stock checkpoint), and when a save may ask the others."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import jmp
from haliax.partitioning import ResourceMapping
from haliax.tree_util import hashable_combine, hashable_partition
from haliax.util import is_named_array
from jax import ShapeDtypeStruct
from jax.sharding import NamedSharding
from jaxtyping import PRNGKeyArray, PyTree
from levanter.checkpoint import load_checkpoint, load_checkpoint_or_initialize
from levanter.trainer_state import TrainerState, saveable_training_mask, trainables_only

from ..algorithm.codecs import wire_format
from ..algorithm.wire import wire_names
from ..axes import ISLAND, Params, without_island
from ..fragments.partition import Place
from ..islands.layout import InFlight, Layout, explain
from ..islands.state import DiLoCoState, island_state
from ..islands.sync import Sync
from .codec import holds_islands, in_checkpoint, is_old, stored_facts, upgraded
from .compatibility import check_model, check_optimizers
from .label import Label
from .relayout import carry_over, check_recut

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StateLoader:
    """Makes the first state of a run; every array of it lies on its canonical sharding."""

    layout: Layout
    sync: Sync
    mp: jmp.Policy
    allow_partial: bool
    """Whether a checkpoint may lack parameters of the model."""

    def spread(self, host: TrainerState) -> DiLoCoState:
        """Starts DiLoCo from a state of the host, fresh or from a stock checkpoint."""
        return self._place(self._of, host)

    def restart(self, state: DiLoCoState, model: PyTree) -> DiLoCoState:
        """Starts at another outer model, in f32, instead of that of `state`."""
        return self._place(DiLoCoState.restarted_at, state, model)

    def resume(
        self, path: str, model_init: Callable[[], PyTree], key: PRNGKeyArray, is_trainable: PyTree
    ) -> DiLoCoState:
        """Continues the DiLoCo run whose checkpoint is at `path`; frozen leaves come from `model_init`.

        Raises:
            ModelError, OptionError: If its model or the state of an optimizer is not of this run's structure.
        """
        stored = self._as_stored(path)
        self._check_model(path, trainables_only(eqx.filter_eval_shape(model_init), is_trainable))
        fresh = functools.partial(stored._fresh, is_trainable)
        shapes = eqx.filter_eval_shape(fresh, model_init, key)
        self._check_optimizers(path, shapes)
        load = load_checkpoint_or_initialize(
            fresh,
            [path],
            axis_mapping=stored._mapping,
            mesh=self.sync.placement.mesh,
            is_checkpointed=in_checkpoint(path, saveable_training_mask(shapes, is_trainable)),
            do_load=True,
            allow_partial=self.allow_partial,
        )
        return self._carried(load(model_init, key), stored, path)

    def shapes(self, model_init: Callable[[], PyTree], is_trainable: PyTree) -> DiLoCoState:
        """The first state of a fresh run as shapes, each with its canonical sharding; nothing is computed."""
        key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
        shapes, static, where = self._canonical(functools.partial(self._fresh, is_trainable), model_init, key)
        leaves, treedef = jax.tree.flatten(shapes)
        placed = [ShapeDtypeStruct(x.shape, x.dtype, sharding=at) for x, at in zip(leaves, where, strict=True)]
        return eqx.combine(treedef.unflatten(placed), static)

    def adopt(self, state: DiLoCoState, path: str) -> DiLoCoState:
        """Loads the full state at `path`, of a DiLoCo run or a stock one, for a run that starts at step 0.

        The schedule starts anew, so a fragment that was in flight is not reduced; its islands keep their progress.
        """
        mesh = self.sync.placement.mesh
        if holds_islands(path):
            stored = self._as_stored(path)
            self._check_model(path, state.theta)
            template = eqx.filter_eval_shape(lambda state: stored._of(self._host_state(state)), state)
            self._check_optimizers(path, template)
            kept, later = eqx.partition(template, in_checkpoint(path, jax.tree.map(lambda _: True, template)))
            loaded = load_checkpoint(kept, path, axis_mapping=stored._mapping, mesh=mesh)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), eqx.filter(later, _is_shape))
            adopted = self._carried(eqx.combine(loaded, zeros, later), stored, path)
        else:
            template = eqx.filter_eval_shape(self._host_state, state)
            adopted = self.spread(load_checkpoint(template, path, axis_mapping=self._mapping, mesh=mesh))
        # The host now sets the step to 0, and nothing of the schedule has happened up to there.
        return dataclasses.replace(adopted, settled=jnp.zeros((), jnp.int32))

    @property
    def _mapping(self) -> ResourceMapping:
        """Logical to mesh axes; islands are whole on every slot where the slots do not divide them."""
        mapping = self.sync.placement.mapping
        if self.layout.num_islands % self.sync.placement.mesh.shape[ISLAND] == 0:
            return mapping
        return {logical: axes for logical, axes in mapping.items() if logical != ISLAND}

    def _check_model(self, path: str, params: Params) -> None:
        check_model(path, params, partial=self.allow_partial)

    def _check_optimizers(self, path: str, shapes: DiLoCoState) -> None:
        check_optimizers(path, shapes, self.layout.diloco.outer.name, partial=self.allow_partial)

    def _as_stored(self, path: str) -> "StateLoader":
        """The loader of states in the layout of the checkpoint at `path`."""
        layout = Layout.stored(stored_facts(path), self.layout.diloco)
        return dataclasses.replace(
            self, layout=layout, sync=dataclasses.replace(self.sync, partition=layout.partition)
        )

    def _carried(self, loaded: DiLoCoState, stored: "StateLoader", path: str) -> DiLoCoState:
        """Places a state of the stored layout, as it is if that is this run's, else carried over to this run's."""
        before, after = stored.layout, self.layout
        if is_old(path):
            loaded = upgraded(loaded, before.facts, stored._sent_by_count(loaded, path))
        # What does not shape the state, such as the wire, may change without a word.
        if before.facts == after.facts:
            return self._place(lambda state: state, loaded)
        if before.partition != after.partition:
            outer = loaded.theta
            name = self.layout.diloco.outer.name
            for partition in (before.partition, after.partition):
                check = functools.partial(check_recut, self.sync.optimizer, partition=partition, name=name)
                eqx.filter_eval_shape(check, outer)
        # By the old schedule: the new one has other events.
        in_flight = InFlight.of(before.diloco.schedule, int(loaded.step), int(loaded.settled))
        logger.info("%s resumes in another layout: %s.", path, explain(before, after, in_flight))

        active = int(loaded.active)

        def carry(old: DiLoCoState) -> DiLoCoState:
            new = self._of(self._host_state(old))
            return carry_over(old, new, before, after, stored.sync, in_flight, active)

        return self._place(carry, loaded)

    def _sent_by_count(self, state: DiLoCoState, path: str) -> int:
        """Bytes that an island has sent by the outer steps in `state`, at the price of the wire in the label."""
        sync, label = self.sync, Label.read(path)
        if label is not None and label.diloco["wire"] in wire_names():
            wire = wire_format(label.diloco["wire"], label.diloco["wire_block"], stochastic=False)
            sync = dataclasses.replace(sync, all_reduce=dataclasses.replace(sync.all_reduce, wire=wire))
        prices: list[int] = []
        for part, count in sync.partition.parts.items():
            prices += [sync.payload_bytes(eqx.filter_eval_shape(sync.displacement, state, Place(part, 0)))] * count
        return sum(price * steps for price, steps in zip(prices, state.outer_steps.tolist(), strict=True))

    def _fresh(self, is_trainable: PyTree, model_init: Callable[[], PyTree], key: PRNGKeyArray) -> DiLoCoState:
        model = model_init()
        return self._of(
            TrainerState.init(self.sync.inner_optimizer, model, key=key, is_trainable=is_trainable, mp=self.mp)
        )

    def _of(self, host: TrainerState) -> DiLoCoState:
        return DiLoCoState.of(host, self.layout, self.sync.optimizer)

    def _place(self, make: Callable[..., DiLoCoState], *args: PyTree) -> DiLoCoState:
        """Runs `make` with the canonical shardings as its result's, so that no step is ever compiled twice."""
        arrays, rest = hashable_partition(args, eqx.is_array)
        shapes, static, where = self._canonical(make, *args)

        def leaves(arrays: PyTree) -> list[jax.Array]:
            return jax.tree.leaves(eqx.filter(make(*hashable_combine(arrays, rest)), eqx.is_array))

        placed = jax.jit(leaves, out_shardings=where)(arrays)
        return eqx.combine(jax.tree.structure(shapes).unflatten(placed), static)

    def _canonical(
        self, make: Callable[..., DiLoCoState], *args: PyTree
    ) -> tuple[PyTree, PyTree, list[NamedSharding]]:
        """What `make` returns, as shapes and the rest, and the shapes' shardings."""
        shapes, static = eqx.partition(eqx.filter_eval_shape(make, *args), _is_shape)
        return shapes, static, self.sync.placement.shardings(shapes)

    def _host_state(self, state: DiLoCoState) -> TrainerState:
        """The state of a host trainer with one island's arrays: the structure of a stock checkpoint."""
        island = jax.tree.map(without_island, jax.tree.map(lambda x: x[0], state.islands), is_leaf=is_named_array)
        return island_state(state, island, state.model, self.sync.inner_optimizer, state.step)


def _is_shape(x: object) -> bool:
    return isinstance(x, ShapeDtypeStruct)
