"""`DiLoCoTrainer`: Levanter's trainer with islands, an outer optimizer and a sync schedule."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import levanter.tracker
import numpy as np
from haliax.tree_util import hashable_combine, hashable_partition
from haliax.util import is_named_array
from humanfriendly import format_size
from jax import ShapeDtypeStruct
from jaxtyping import PRNGKeyArray, PyTree
from levanter.callbacks import StepInfo
from levanter.checkpoint import latest_checkpoint_path, load_checkpoint, load_checkpoint_or_initialize
from levanter.tracker.helpers import log_optimizer_hyperparams
from levanter.trainer import Trainer, TrainStepResult, _unify_model_and_model_init
from levanter.trainer_state import TrainerState, saveable_training_mask, trainables_only

from .checkpoint import check_resumable, holds_islands, save_without_barriers
from .fragments import Partition
from .inner import without_island
from .mesh import state_shardings
from .metrics import Board, IslandRecord, IslandTracker, StepRecord, first_local, local_values, owned_islands
from .programs import Kind, Programs
from .state import DiLoCoState, schedule_facts
from .summary import Traffic, announce
from .sync import Sync
from .trainer_config import DiLoCoTrainerConfig


class DiLoCoTrainer(Trainer):
    """A `levanter.trainer.Trainer` whose step is the host's own, once for every island, and whose model is Theta.

    The host's loop, hooks, checkpointer and evaluation are used as they are; they see `state.model`, the
    outer model. An inner host trainer does the inner steps.
    """

    config: DiLoCoTrainerConfig

    def __init__(
        self, config: DiLoCoTrainerConfig, optimizer: Any, loss_fn: Any, *, add_default_hooks: bool = True
    ):  # Any: as the host's
        super().__init__(config, optimizer, loss_fn, add_default_hooks=add_default_hooks)
        diloco = config.diloco
        self.schedule = diloco.schedule
        self.partition = Partition(diloco.num_fragments, diloco.layer_order)
        self.outer_optimizer = diloco.outer.build(-(-config.num_train_steps // self.schedule.effective_period))
        self._sync = Sync(
            self.partition, self.outer_optimizer, diloco.mixing_alpha, self.device_mesh, self.parameter_axis_mapping
        )
        self._island_trainer = Trainer(config.island_config, optimizer, loss_fn, add_default_hooks=False)
        self._island_trainer.hooks = self.hooks
        self._owned = owned_islands(self.device_mesh, config.layout.per_slot)
        self._programs: Programs | None = None
        board = None
        if jax.process_count() > 1:
            if self._owned:
                board = Board(self.run_id, 2 * self.schedule.effective_period)
            if self._checkpointer is not None:
                save_without_barriers(self._checkpointer, self.schedule)
        loggers = getattr(self.tracker, "loggers", [self.tracker])
        self.tracker = IslandTracker(loggers, config.layout.num_islands, board)

    def initial_state(
        self,
        training_key: PRNGKeyArray,
        model: PyTree | None = None,
        model_init: Callable[[], PyTree] | None = None,
        *,
        is_trainable: PyTree = True,
    ) -> DiLoCoState:
        """Resumes a DiLoCo checkpoint, or starts DiLoCo from the host's initial state (fresh or a stock checkpoint).

        Raises:
            TypeError, ValueError: If the partition cannot cut the model, before it is built where the host
                builds it here; or if the checkpoint's islands or fragments are not this run's.
        """
        init = _unify_model_and_model_init(model, model_init)
        self.partition.check(trainables_only(eqx.filter_eval_shape(init), is_trainable))
        paths, load = self.checkpoint_load_plan()
        path = latest_checkpoint_path(*paths) if load else None
        if path is not None and holds_islands(path):
            state = self._resume(path, init, training_key, is_trainable)
        else:
            state = self._spread(super().initial_state(training_key, model, model_init, is_trainable=is_trainable))
        self.traffic = Traffic.of(state, self.partition)
        levanter.tracker.log_summary(announce(self.config, state, self.partition, self.traffic))
        return state

    def adopt(self, state: DiLoCoState, path: str) -> DiLoCoState:
        """Loads the full state at `path`, of a DiLoCo run or a stock one, for a run that starts at step 0."""
        where = {"axis_mapping": self.parameter_axis_mapping, "mesh": self.device_mesh}
        if holds_islands(path):
            check_resumable(path, schedule_facts(self.config.diloco, self.config.layout.num_islands))
            state = self._place(lambda state: state, load_checkpoint(state, path, **where))
        else:
            state = self._spread(load_checkpoint(eqx.filter_eval_shape(self._host_state, state), path, **where))
        # The host now sets the step to 0; nothing of the schedule has happened yet.
        return dataclasses.replace(state, settled=jnp.zeros((), jnp.int32))

    def train(self, state: DiLoCoState, train_loader: Iterable[Any]) -> StepInfo[DiLoCoState]:
        info = super().train(state, train_loader)
        if jax.process_index() == 0:
            self._say_farewell(info)
        return info

    def training_steps(self, state: DiLoCoState, train_loader: Iterable[Any]) -> Iterator[StepInfo[DiLoCoState]]:
        info = None
        for info in super().training_steps(state, train_loader):
            yield info
        if info is not None and info.next_step < self.num_train_steps and self.config.diloco.final_sync:
            # The data ended early, so no step knew that it was the last. The host's closing hooks come next.
            info.state = self._settle(info.state, StepRecord({}, {}, 0))

    @functools.cached_property
    def _jit_train_step_fn(self) -> Callable[..., TrainStepResult]:
        return functools.partial(self._step, hooks=True)

    @functools.cached_property
    def _jit_train_step_fn_no_hook(self) -> Callable[..., TrainStepResult]:
        return functools.partial(self._step, hooks=False)

    def _step(self, state: DiLoCoState, batch: tuple, batch_kwargs: dict, *, hooks: bool) -> TrainStepResult:
        """Inner step t of every island, and what the schedule has for it."""
        if self._programs is None:
            diloco = self.config.diloco
            self._programs = Programs(
                self._island_trainer, self._sync, diloco.islands_per_slot, diloco.overlap_steps, state
            )
        programs, schedule = self._programs, self.schedule
        step, since = int(state.step) + 1, int(state.settled)
        fragment = schedule.reduced(step, since)
        state, inner, report = programs.step(state, (batch, batch_kwargs), reduce=fragment, hooks=hooks)
        losses = local_values(inner.loss)
        record = StepRecord({k: IslandRecord(loss) for k, loss in losses.items() if k in self._owned}, {}, 0)
        if report is not None:
            record.add_sync(fragment, report, self.traffic.by_fragment[fragment])
        if schedule.overlap_steps > 0:
            if (merging := schedule.merged(step, since)) is not None:
                state, _ = programs.apply("merge", state, merging)
            if (captured := schedule.captured(step, since)) is not None:
                state, _ = programs.apply("keep", state, captured)
        if step == self.num_train_steps and self.config.diloco.final_sync:
            state = self._settle(state, record)
        record.bytes_per_island = self.traffic.sent(state.outer_steps)
        self.tracker.report(step - 1, record)
        self._log_inner_hyperparameters(state, step - 1)
        metrics = {name: np.mean(list(local_values(v).values())) for name, v in inner.loss_metrics.items()}
        infos = first_local(inner.hook_infos) if hooks else None
        return TrainStepResult(np.float32(np.mean(list(losses.values()))), state, metrics, infos)

    def _settle(self, state: DiLoCoState, record: StepRecord) -> DiLoCoState:
        """The final sync: merges what is in flight, then syncs each fragment that still has unsynced progress."""
        step, since = int(state.step), int(state.settled)

        def run(kind: Kind, state: DiLoCoState, fragment: int) -> DiLoCoState:
            state, report = self._programs.apply(kind, state, fragment)
            if report is not None:
                record.add_sync(fragment, report, self.traffic.by_fragment[fragment])
            return state

        for capture, fragment in self.schedule.unmerged(step, since):
            if capture == step:  # its outer step would have come in step + 1
                state = run("reduce_kept", state, fragment)
            state = run("merge", state, fragment)
        for fragment in self.schedule.unsynced(step, self.config.diloco.mixing_alpha, since):
            state = run("whole", state, fragment)
        return run("settle", state, 0)

    def _resume(self, path: str, init: Callable, key: PRNGKeyArray, is_trainable: PyTree) -> DiLoCoState:
        check_resumable(path, schedule_facts(self.config.diloco, self.config.layout.num_islands))

        def fresh(init: Callable, key: PRNGKeyArray) -> DiLoCoState:
            host = TrainerState.init(self.optimizer, init(), key=key, is_trainable=is_trainable, mp=self.mp)
            return self._of(host)

        saved = saveable_training_mask(eqx.filter_eval_shape(fresh, init, key), is_trainable)
        load = load_checkpoint_or_initialize(
            fresh,
            [path],
            axis_mapping=self.parameter_axis_mapping,
            mesh=self.device_mesh,
            is_checkpointed=saved,
            do_load=True,
        )
        return self._place(lambda state: state, load(init, key))

    def _of(self, host: TrainerState) -> DiLoCoState:
        return DiLoCoState.of(host, self.config.diloco, self.config.layout.num_islands, self.outer_optimizer)

    def _spread(self, host: TrainerState) -> DiLoCoState:
        return self._place(self._of, host)

    def _place(self, make: Callable[..., DiLoCoState], *args: PyTree) -> DiLoCoState:
        """Runs `make` with every array of its state on its canonical sharding, so that no step compiles twice."""
        arrays, rest = hashable_partition(args, eqx.is_array)
        shapes, static = eqx.partition(eqx.filter_eval_shape(make, *args), lambda x: isinstance(x, ShapeDtypeStruct))

        def leaves(arrays: PyTree) -> list[jax.Array]:
            return jax.tree.leaves(eqx.filter(make(*hashable_combine(arrays, rest)), eqx.is_array))

        where = state_shardings(shapes, self.device_mesh, self.parameter_axis_mapping)
        placed = jax.jit(leaves, out_shardings=where)(arrays)
        return eqx.combine(jax.tree.structure(shapes).unflatten(placed), static)

    def _host_state(self, state: DiLoCoState) -> TrainerState:
        """The state of the host trainer that one island stands for: the structure of a stock checkpoint."""
        island = jax.tree.map(without_island, jax.tree.map(lambda x: x[0], state.islands), is_leaf=is_named_array)
        return TrainerState(
            step=state.step,
            model=eqx.combine(island.params, state.model),
            optimizer=self.optimizer,
            opt_state=island.opt_state,
            training_key=state.training_key,
            is_trainable=state.is_trainable,
            mp=state.mp,
            model_averaging=None,
        )

    def _maybe_save_jaxpr(self, name: str, fn: Callable, *args: Any, **kwargs: Any) -> Any:  # Any: as the host's
        out = fn(*args, **kwargs)
        return out

    def _log_inner_hyperparameters(self, state: DiLoCoState, step: int) -> None:
        """Logs `optim/*` from the islands, where the inner optimizer's state lives; the host looks in `opt_state`."""
        inner = getattr(state.islands.opt_state, "inner_opt_state", state.islands.opt_state)
        if (hyperparameters := getattr(inner, "hyperparams", None)) is not None:
            own = SimpleNamespace(hyperparams=first_local(hyperparameters))
            log_optimizer_hyperparams(own, prefix="optim", step=step)

    def _say_farewell(self, info: StepInfo[DiLoCoState]) -> None:
        loss = self.tracker.eval_loss
        sent, parallel = self.traffic.sent(info.state.outer_steps), self.traffic.data_parallel * info.next_step
        ratio = f", {parallel / sent:.1f} times less" if sent else ""
        print(f"final outer validation loss: {'none evaluated' if loss is None else f'{loss:.4f}'}")
        print(
            f"bytes sent per island: {format_size(sent, binary=True)}, against {format_size(parallel, binary=True)} of data parallel{ratio}"
        )
        print(f"checkpoint: {self.checkpoint_path}/step-{info.step}")


@contextmanager
def islands_in(host: ModuleType) -> Iterator[None]:
    """Lets the host's `main` in `host` (such as `levanter.main.train_lm`) build a `DiLoCoTrainer`.

    The module's own names `Trainer` and `load_checkpoint` are replaced for as long as the context lasts; all
    else of its `main` is used as it is.
    """
    host_trainer, host_load = host.Trainer, host.load_checkpoint
    trainers: list[DiLoCoTrainer] = []

    def build(*args: Any, **kwargs: Any) -> DiLoCoTrainer:  # Any: as the host calls its own
        trainers.append(DiLoCoTrainer(*args, **kwargs))
        return trainers[-1]

    def load(tree: PyTree, path: str, **kwargs: Any) -> PyTree:
        return trainers[-1].adopt(tree, path) if isinstance(tree, DiLoCoState) else host_load(tree, path, **kwargs)

    host.Trainer, host.load_checkpoint = build, load
    try:
        yield
    finally:
        host.Trainer, host.load_checkpoint = host_trainer, host_load
