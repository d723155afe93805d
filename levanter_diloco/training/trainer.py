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

from ..checkpoint import orbax
from ..checkpoint.codec import holds_islands
from ..checkpoint.loading import StateLoader
from ..checkpoint.recovery import (
    checkpoint_to_resume,
    refuse_without_metadata,
    set_unfinished_aside,
)
from ..checkpoint.saving import prepare
from ..host.checkpointer import save_along, save_without_barriers
from ..host.moe import experts_by_shard
from ..islands.byte_count import count_of
from ..islands.layout import Layout
from ..islands.programs import Programs
from ..islands.state import DiLoCoState, OuterStepInfo
from ..islands.sync import SyncReport
from .build import build_sync
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

Reports = list[tuple[int, SyncReport]]
"""Of the syncs of one step, in order, each with its fragment; on the devices until they are read."""


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
        if add_default_hooks:
            # The host's constructor looks for temporary checkpoints, and would die of one that cannot be read.
            refuse_without_metadata(config.own_checkpoint_paths)
        super().__init__(config, optimizer, loss_fn, add_default_hooks=add_default_hooks)
        layout = Layout(config.diloco, config.islands.num_islands, config.island_sharding)
        self.schedule, self.participation = config.diloco.schedule, config.participation
        self.partition = layout.partition
        self.sync = build_sync(config, layout.partition, optimizer)
        self.loader = StateLoader(layout, self.sync, config.mp, config.allow_partial_checkpoint)
        with levanter.tracker.current_tracker(self.tracker):  # else it would start trackers of its own
            self._island_trainer = Trainer(config.island_config, optimizer, loss_fn, add_default_hooks=False)
        self._island_trainer.hooks = self.hooks
        self._owned = owned_islands(self.device_mesh, config.islands.per_slot)
        self._programs: Programs | None = None
        self._record: StepRecord | None = None
        self._save_islands()
        # pyrefly: ignore[bad-argument-type]  the host has just set a tracker of its own
        loggers: list[Tracker] = getattr(self.tracker, "loggers", [self.tracker])
        self.tracker = IslandTracker(loggers, self._board())

    def _save_islands(self) -> None:
        """Lets the host's checkpointer save what islands need besides, and wait for no other process at a sync."""
        if self._checkpointer is None:
            return
        if jax.process_count() > 1:
            save_without_barriers(self._checkpointer, lambda step: self.schedule.crossing(step + 1) is not None)
        config = self.config
        facts = {"mesh": self.device_mesh, "num_islands": config.islands.num_islands, "diloco": config.diloco}
        save_along(self._checkpointer, functools.partial(prepare, **facts))

    def _board(self) -> Board | None:
        """Where this process leaves its islands' records for others, if there are any."""
        if jax.process_count() == 1 or not self._owned:
            return None
        # A sync ends any larger lead of one process over another.
        return Board(self.run_id, 2 * (self.schedule.effective_period + self.schedule.overlap_steps))

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
        if self._checkpointer is not None:
            set_unfinished_aside(self.config.own_checkpoint_paths)
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
            sent = count_of(info.state.sent_bytes)
            print(farewell(self.tracker.eval_loss, self.traffic, sent, info.next_step, checkpoint))
        return info

    # pyrefly: ignore[bad-override]
    def training_steps(self, state: DiLoCoState, train_loader: Iterable[Any]) -> Iterator[StepInfo[DiLoCoState]]:
        info = None
        for info in super().training_steps(state, train_loader):
            yield info
        if info is not None and info.next_step < self.num_train_steps and self.config.diloco.final_sync:
            # The data ended early, so no step knew that it was the last. The host's closing hooks come next.
            logger.info("The data ended at step %d: final sync.", info.next_step)
            assert self._record is not None  # a step was taken
            state, reports = self._final_sync(info.state)
            info.state = self._account(state, self._record, reports)

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
        active = int(state.active)
        crossing, captured = schedule.crossing(step, since), schedule.captured(step, since)
        weights = None if captured is None else self.participation.weights(step, captured, since)
        data = (batch, batch_kwargs)
        state, inner, report = programs.step(state, data, crossing=crossing, weights=weights, hooks=hooks)
        reports = [] if crossing is None or report is None else [(crossing.fragment, report)]
        # Everything of this step is dispatched before a number of it is read, or the devices would wait for the host.
        if schedule.overlap_steps > 0:
            if (merging := schedule.merged(step, since)) is not None:
                state, _ = programs.apply("merge", state, merging)
            if captured is not None:
                state, _ = programs.apply("capture", state, captured, weights)
        if step == self.num_train_steps and self.config.diloco.final_sync:
            state, more = self._final_sync(state)
            reports += more
        losses = local_values(inner.loss)
        own = {k: IslandRecord(loss) for k, loss in losses.items() if k in self._owned and k < active}
        self._record = StepRecord(own, {}, 0, active)
        state = self._account(state, self._record, reports)
        log_optimizer_hyperparams(inner_hyperparameters(state.islands.opt_state), prefix="optim", step=step - 1)
        infos = first_local(inner.hook_infos) if hooks else None
        loss_metrics = {name: self._local_mean(values, active) for name, values in inner.loss_metrics.items()}
        return TrainStepResult(self._local_mean(inner.loss, active), state, loss_metrics, infos)

    def _account(self, state: DiLoCoState, record: StepRecord, reports: Reports) -> DiLoCoState:
        """Reads the reports of syncs into the record of their step and reports that; heals what the guard left out."""
        syncs = {fragment: record.add_sync(fragment, report, self._owned) for fragment, report in reports}
        if self.config.diloco.guard:
            state = replace_left_out(state, self.programs_for(state), record, syncs)
        record.bytes_per_island = count_of(state.sent_bytes)
        self.tracker.report(int(state.step) - 1, record)
        return state

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

    def _final_sync(self, state: DiLoCoState) -> tuple[DiLoCoState, Reports]:
        """Merges what is in flight, then syncs each fragment that still has unsynced progress."""
        programs, schedule = self.programs_for(state), self.schedule
        step, since = int(state.step), int(state.settled)
        reports: Reports = []
        for crossing in schedule.to_cross(step, since):
            state, report = programs.reduce_and_step(state, crossing)
            reports += [] if report is None else [(crossing.fragment, report)]
        for _, fragment in schedule.unmerged(step, since):
            state, _ = programs.apply("merge", state, fragment)
        for fragment in schedule.unsynced(step, self.config.diloco.mixing_alpha, since):
            weights = self.participation.weights(step, fragment, since)
            state, report = programs.apply("sync", state, fragment, weights)
            reports += [] if report is None else [(fragment, report)]
        return programs.mark_settled(state), reports

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
