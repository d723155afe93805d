"""The first state of a run (fresh, resumed, or from a stock checkpoint), and when a save may ask the others."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from haliax.tree_util import hashable_combine, hashable_partition
from haliax.util import is_named_array
from jax import ShapeDtypeStruct
from jax.sharding import NamedSharding
from jaxtyping import PRNGKeyArray, PyTree
from levanter.checkpoint import Checkpointer, load_checkpoint, load_checkpoint_or_initialize
from levanter.checkpoint_manifest import read_manifest
from levanter.trainer_state import TrainerState, saveable_training_mask

from .errors import PATH, OptionError
from .fragments import Partition
from .inner import without_island
from .schedule import Schedule
from .state import DiLoCoState, island_state, schedule_facts
from .trainer_config import DiLoCoTrainerConfig


def holds_islands(path: str) -> bool:
    """Whether the checkpoint at `path` is one of a DiLoCo run; a stock one of Levanter is not."""
    manifest = read_manifest(path)
    return manifest is not None and "schedule/islands" in manifest.array_paths


@dataclass(frozen=True)
class StateLoader:
    """Makes the first state of a run; every array of it lies on its canonical sharding."""

    config: DiLoCoTrainerConfig
    partition: Partition
    optimizer: optax.GradientTransformation
    """The inner optimizer."""

    outer_optimizer: optax.GradientTransformation

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
            OptionError: If its islands, fragments or events are not those of this run.
        """
        self._check_resumable(path)
        fresh = functools.partial(self._fresh, is_trainable)
        load = load_checkpoint_or_initialize(
            fresh,
            [path],
            axis_mapping=self.config.parameter_axis_mapping,
            mesh=self.config.device_mesh,
            is_checkpointed=saveable_training_mask(eqx.filter_eval_shape(fresh, model_init, key), is_trainable),
            do_load=True,
            allow_partial=self.config.allow_partial_checkpoint,
        )
        return self._place(lambda state: state, load(model_init, key))

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
        template = state
        if holds_islands(path):
            self._check_resumable(path)
        else:
            template = eqx.filter_eval_shape(self._host_state, state)
        mapping, mesh = self.config.parameter_axis_mapping, self.config.device_mesh
        loaded = load_checkpoint(template, path, axis_mapping=mapping, mesh=mesh)
        adopted = self._place(lambda state: state, loaded) if template is state else self.spread(loaded)
        # The host now sets the step to 0, and nothing of the schedule has happened up to there.
        return dataclasses.replace(adopted, settled=jnp.zeros((), jnp.int32))

    def _check_resumable(self, path: str) -> None:
        facts = schedule_facts(self.config.diloco, self.partition, self.config.layout.num_islands)
        template = {name: ShapeDtypeStruct((), jnp.int32) for name in facts}
        arrays: Mapping[str, Any] = load_checkpoint(template, path, subpath="schedule")  # Any: arrays for structs
        stored = {name: int(value) for name, value in arrays.items()}
        for name, value in facts.items():
            # Without overlap nothing is ever in flight, so the period may change between two syncs.
            free = name == "sync_period" and stored["overlap_steps"] == facts["overlap_steps"] == 0
            if not free and stored[name] != value:
                options = {
                    "islands": "ici_islands x dcn_islands x islands_per_slot",
                    "sequential_layers": "layer_order (1: sequential)",
                    "balanced": "partition (1: balanced)",
                    "pieces_of_shares": "outer_memory (1: sharded, with overlap_steps above 1)",
                    "island_sharding": "partition (balanced: checksum of how an island shards parameters)",
                }
                raise OptionError(
                    f"{PATH}.{options.get(name, name)} ({value}) must be that of the checkpoint {path}; "
                    f"{stored[name]} works, or another trainer.id with initialize_model_from_checkpoint_path to start "
                    "anew from its outer parameters."
                )

    def _fresh(self, is_trainable: PyTree, model_init: Callable[[], PyTree], key: PRNGKeyArray) -> DiLoCoState:
        model = model_init()
        return self._of(
            TrainerState.init(self.optimizer, model, key=key, is_trainable=is_trainable, mp=self.config.mp)
        )

    def _of(self, host: TrainerState) -> DiLoCoState:
        config = self.config
        return DiLoCoState.of(host, config.diloco, self.partition, config.layout.num_islands, self.outer_optimizer)

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
        shapes, static = eqx.partition(eqx.filter_eval_shape(make, *args), lambda x: isinstance(x, ShapeDtypeStruct))
        return shapes, static, self.config.placement.shardings(shapes)

    def _host_state(self, state: DiLoCoState) -> TrainerState:
        """The state of a host trainer with one island's arrays: the structure of a stock checkpoint."""
        island = jax.tree.map(without_island, jax.tree.map(lambda x: x[0], state.islands), is_leaf=is_named_array)
        return island_state(state, island, state.model, self.optimizer, state.step)


def save_without_barriers(checkpointer: Checkpointer, schedule: Schedule) -> None:
    """Lets `checkpointer` ask the other processes only when the islands meet anyway.

    The host broadcasts every step whether to save, which would be a barrier between islands. What the
    step count decides needs no broadcast; what the clock or a request decides waits for the next sync.
    """
    host_on_step = checkpointer.on_step

    def on_step(*, tree: PyTree, step: int, force: bool = False) -> None:
        every = checkpointer._get_current_step_save_interval(step)
        due = every is not None and step % every == 0
        if force or due or schedule.crossing(step + 1) is not None:
            host_on_step(tree=tree, step=step, force=force)

    checkpointer.on_step = on_step
