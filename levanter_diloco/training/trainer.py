"""`DiLoCoTrainer`: Levanter's trainer with islands, an outer optimizer and a sync schedule."""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import levanter.tracker
import numpy as np
import optax
from jaxtyping import PRNGKeyArray, PyTree
from levanter.callbacks import StepInfo
from levanter.tracker import Tracker
from levanter.tracker.helpers import log_optimizer_hyperparams
from levanter.trainer import Trainer, TrainStepResult, _unify_model_and_model_init
from levanter.trainer_state import trainables_only
from levanter.utils.types import ComputeLossFunction

from ..algorithm.wire import wire_format
from ..checkpoint import orbax
from ..checkpoint.compatibility import holds_islands
from ..checkpoint.loading import StateLoader
from ..checkpoint.recovery import (
    checkpoint_to_resume,
    refuse_without_metadata,
    set_unfinished_aside,
)
from ..checkpoint.saving import prepare
from ..host.checkpointer import save_along, save_without_barriers
from ..host.moe import experts_by_shard
from ..islands.all_reduce import Exchange
from ..islands.layout import Layout
from ..islands.programs import Programs
from ..islands.state import DiLoCoState, OuterStepInfo
from ..islands.sync import Guard, Sync, SyncReport
from .config import DiLoCoTrainerConfig
from .membership import admit, replace_left_out
from .metrics import (
    IslandRecord,
    StepRecord,
    first_local,
    inner_hyperparameters,
    local_values,
    mean_loss,
    owned_islands,
)
from .summary import Traffic, announce, farewell
from .trackers import Board, IslandTracker

logger = logging.getLogger(__name__)


class DiLoCoTrainer(Trainer):
    """A `levanter.trainer.Trainer` whose step is the host's own, once for every island, and whose model is Theta.

    The host's loop, hooks, checkpointer and evaluation are used as they are; they see `state.model`, the
    outer model. An inner host trainer does the inner steps.
    """

    config: DiLoCoTrainerConfig  # pyrefly: ignore[bad-override-mutable-attribute]  the host never replaces it
    tracker: IslandTracker  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(
        self,
        config: DiLoCoTrainerConfig,
        optimizer: optax.GradientTransformation,
        loss_fn: ComputeLossFunction,
        *,
        add_default_hooks: bool = True,
    ):
        diloco = config.diloco
        if add_default_hooks:  # among which is the host's checkpointer, that would die of it
            set_unfinished_aside(config.own_checkpoint_paths)
            refuse_without_metadata(config.own_checkpoint_paths)
        super().__init__(config, optimizer, loss_fn, add_default_hooks=add_default_hooks)
        self.schedule = diloco.schedule
        layout = Layout(diloco, config.layout.num_islands, config.island_sharding)
        self.partition = layout.partition
        # A fragment syncs once a period, begun ones included, and once more in the final sync.
        outer_steps = -(-config.num_train_steps // self.schedule.effective_period) + diloco.final_sync
        outer_optimizer = diloco.outer.build(outer_steps)
        wire = wire_format(diloco.wire, diloco.wire_block, diloco.wire_rounding == "stochastic")
        exchange = Exchange(
            self.device_mesh,
            self.parameter_axis_mapping,
            wire,
            self.schedule.num_pieces,
            config.placement.sharded,
        )
        self.sync = Sync(
            self.partition,
            outer_optimizer,
            diloco.mixing_alpha,
            exchange,
            config.placement,
            optimizer,
            Guard(diloco.guard, diloco.guard_factor),
        )
        self.loader = StateLoader(layout, self.sync, config.mp, config.allow_partial_checkpoint)
        self.participation = config.participation
        with levanter.tracker.current_tracker(self.tracker):  # else it would start trackers of its own
            self._island_trainer = Trainer(config.island_config, optimizer, loss_fn, add_default_hooks=False)
        self._island_trainer.hooks = self.hooks
        self._owned = owned_islands(self.device_mesh, config.layout.per_slot)
        self._programs: Programs | None = None
        board = None
        if jax.process_count() > 1:
            if self._owned:
                # A sync ends any larger lead of one process over another.
                board = Board(self.run_id, 2 * (self.schedule.effective_period + self.schedule.overlap_steps))
            if self._checkpointer is not None:
                save_without_barriers(self._checkpointer, lambda step: self.schedule.crossing(step + 1) is not None)
        if self._checkpointer is not None:
            facts = {"mesh": self.device_mesh, "num_islands": layout.num_islands, "diloco": diloco}
            save_along(self._checkpointer, functools.partial(prepare, **facts))
        # pyrefly: ignore[bad-argument-type]  the host has just set a tracker of its own
        loggers: list[Tracker] = getattr(self.tracker, "loggers", [self.tracker])
        self.tracker = IslandTracker(loggers, board)

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
            ModelError, OptionError: If the partition cannot cut the model, found before the host builds it here;
                or if the checkpoint's state cannot be carried over to this run.
        """
        init = _unify_model_and_model_init(model, model_init)
        outer = trainables_only(eqx.filter_eval_shape(init), is_trainable)
        self.partition.check(outer)
        paths, load = self.checkpoint_load_plan()
        path = checkpoint_to_resume(paths, self.config.diloco.on_damaged_checkpoint) if load else None
        if path is not None and holds_islands(path):
            state = self.loader.resume(path, init, training_key, is_trainable)
        else:
            host = super().initial_state(training_key, model, model_init, is_trainable=is_trainable)
            state = self.loader.spread(host)
            if not load and (source := self.config.diloco.initialize_from_orbax) is not None:
                orbax.check(source, state.model)
                state = self.loader.restart(state, orbax.read(source, state.model, self.parameter_axis_mapping))
        self.traffic = Traffic.of(state, self.sync)
        levanter.tracker.log_summary(announce(self.config, state, self.partition, self.traffic))
        return state

    # pyrefly: ignore[bad-override]  this trainer has states of one kind
    def train(self, state: DiLoCoState, train_loader: Iterable[Any]) -> StepInfo[DiLoCoState]:
        info = super().train(state, train_loader)
        if jax.process_index() == 0:
            checkpoint = f"{self._checkpointer.base_path}/step-{info.step}" if self._checkpointer else "none"
            print(farewell(self.tracker.eval_loss, self.traffic, info.state.outer_steps, info.next_step, checkpoint))
        return info

    # pyrefly: ignore[bad-override]
    def training_steps(self, state: DiLoCoState, train_loader: Iterable[Any]) -> Iterator[StepInfo[DiLoCoState]]:
        info = None
        for info in super().training_steps(state, train_loader):
            yield info
        if info is not None and info.next_step < self.num_train_steps and self.config.diloco.final_sync:
            # The data ended early, so no step knew that it was the last. The host's closing hooks come next.
            logger.info("The data ended at step %d: final sync.", info.next_step)
            info.state = self._settle(info.state, StepRecord({}, {}, 0, int(info.state.active)))

    # pyrefly: ignore[bad-override]
    def run_hooks(self, info: StepInfo[DiLoCoState], force: bool = False) -> None:
        with experts_by_shard():  # of evaluations
            super().run_hooks(OuterStepInfo(**vars(info)), force)

    @functools.cached_property
    # pyrefly: ignore[bad-override]  several programs in the place of one
    def _jit_train_step_fn(self) -> Callable[..., TrainStepResult]:
        return functools.partial(self._step, hooks=True)

    @functools.cached_property
    # pyrefly: ignore[bad-override]
    def _jit_train_step_fn_no_hook(self) -> Callable[..., TrainStepResult]:
        return functools.partial(self._step, hooks=False)

    def _step(self, state: DiLoCoState, batch: tuple, batch_kwargs: dict, *, hooks: bool) -> TrainStepResult:
        """Inner step t of every island, and what the schedule has for it."""
        programs, schedule = self.programs_for(state), self.schedule
        step, since = int(state.step) + 1, int(state.settled)
        state = admit(state, programs, self.participation, copied=self.config.diloco.join_moments == "copied")
        crossing, captured = schedule.crossing(step, since), schedule.captured(step, since)
        weights = None if captured is None else self.participation.weights(step, captured, since)
        data = (batch, batch_kwargs)
        state, inner, report = programs.step(state, data, crossing=crossing, weights=weights, hooks=hooks)
        losses = local_values(inner.loss)
        active = int(state.active)
        present = {k: IslandRecord(loss) for k, loss in losses.items() if k in self._owned and k < active}
        record = StepRecord(present, {}, 0, active)
        self._note(record, None if crossing is None else crossing.fragment, report)
        if schedule.overlap_steps > 0:
            if (merging := schedule.merged(step, since)) is not None:
                state, _ = programs.apply("merge", state, merging)
            if captured is not None:
                state, _ = programs.apply("keep", state, captured, weights)
        if step == self.num_train_steps and self.config.diloco.final_sync:
            state = self._settle(state, record)
        if self.config.diloco.guard:
            state = replace_left_out(state, programs, record)
        record.bytes_per_island = self.traffic.sent(state.outer_steps)
        self.tracker.report(step - 1, record)
        log_optimizer_hyperparams(inner_hyperparameters(state.islands.opt_state), prefix="optim", step=step - 1)
        infos = first_local(inner.hook_infos) if hooks else None
        loss_metrics = {name: self._local_mean(values, active) for name, values in inner.loss_metrics.items()}
        return TrainStepResult(self._local_mean(inner.loss, active), state, loss_metrics, infos)

    def _note(self, record: StepRecord, fragment: int | None, report: SyncReport | None) -> None:
        if fragment is not None and report is not None:
            record.add_sync(fragment, report, self.traffic.of_sync(fragment))

    def _local_mean(self, per_island: jax.Array, active: int) -> Any:  # Any: a float where the host has an array
        """Mean over the islands of this process that train; with the guard, of what is finite."""
        values = local_values(per_island)
        # A process whose islands are all absent has to say something.
        present = [value for island, value in values.items() if island < active] or [*values.values()]
        return np.float32(mean_loss(present) if self.config.diloco.guard else np.mean(present))

    def programs_for(self, state: DiLoCoState) -> Programs:
        """The run's programs, made from the first state that is trained: the host may still change one before."""
        if self._programs is None:
            self._programs = Programs(self._island_trainer, self.sync, self.config.diloco.islands_per_slot, state)
        return self._programs

    def _settle(self, state: DiLoCoState, record: StepRecord) -> DiLoCoState:
        """The final sync: merges what is in flight, then syncs each fragment that still has unsynced progress."""
        programs, schedule = self.programs_for(state), self.schedule
        step, since = int(state.step), int(state.settled)
        for crossing in schedule.to_cross(step, since):
            state, report = programs.cross(state, crossing)
            self._note(record, crossing.fragment, report)
        for _, fragment in schedule.unmerged(step, since):
            state, _ = programs.apply("merge", state, fragment)
        for fragment in schedule.unsynced(step, self.config.diloco.mixing_alpha, since):
            weights = self.participation.weights(step, fragment, since)
            state, report = programs.apply("whole", state, fragment, weights)
            self._note(record, fragment, report)
        return programs.settle(state)

    def _maybe_save_jaxpr(self, name: str, fn: Any, *args: Any, **kwargs: Any) -> Any:  # Any: as the host's
        """Writes the host's artifacts, `<name>.jaxpr.txt.gz` and `<name>.hlo.txt`, for the inner step program."""
        config = self.config
        if name not in self._logged_jaxprs and (config.log_jaxprs or config.log_xla_hlo):
            state, batch, batch_kwargs = args
            hooks = fn.keywords["hooks"]
            traced = self.programs_for(state).trace_step(state, (batch, batch_kwargs), hooks=hooks)
            if config.log_jaxprs:
                text = traced.jaxpr.pretty_print(name_stack=True, use_color=False)
                self.write_artifact(f"{name}.jaxpr.txt.gz", text, type="jaxpr")
            if config.log_xla_hlo:
                self.write_artifact(f"{name}.hlo.txt", traced.lower().as_text("stablehlo"), type="hlo")
            self._logged_jaxprs.add(name)
        return fn(*args, **kwargs)
