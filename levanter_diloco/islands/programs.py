"""The compiled programs of a run, on its training state.

The inner step, and the inner step with a reduce: one for each part of the partition, the fragment's index
traced, and where fragments cross in several pieces another one for the last. Which one runs is host arithmetic,
so no program holds a branch, and their number does not grow with P.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Literal, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import numpy as np
from haliax.tree_util import hashable_combine, hashable_partition
from haliax.types import IntScalar
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, PyTree
from levanter.trainer import Trainer

from ..algorithm.schedule import Crossing, Schedule
from ..axes import ISLAND
from ..fragments.partition import Place
from .inner import InnerReport, inner_step
from .state import DiLoCoState
from .sync import Sync, SyncReport

Verb = Literal["capture", "merge", "sync"]
"""A method of `Sync` on a fragment, apart from an inner step."""

Weights = Float[np.ndarray, " K"]

VERBS_OF_OVERLAP: tuple[Verb, ...] = ("capture", "merge")


class StepProgram(NamedTuple):
    """A program that a step of the run may consist of."""

    name: str
    runs: int
    """In a period."""

    crossing: Crossing | None
    """What crosses in it: a piece of the first of the fragments that it serves."""

    trace: Callable[[], jax.stages.Traced]


class Programs:
    """The compiled functions of one run. Each donates the state it is given."""

    def __init__(self, trainer: Trainer, sync: Sync, islands_per_slot: int, state: DiLoCoState):
        """Args:
        trainer: The host trainer of one island.
        sync: The run's sync.
        islands_per_slot: Islands on one slot of the mesh axis.
        state: Any state of the run: its structure and its non-array leaves never change. Where it has room
            for a captured fragment (V >= 1), a sync stands around the inner step of its program, else behind.
        """
        self._trainer = trainer
        self._sync = sync
        self._islands_per_slot = islands_per_slot
        # Programs take and return plain lists: a state holds functions and masks too, which are no arguments of jit.
        arrays, self._static = eqx.partition(state, _is_array)
        self._treedef = jax.tree.structure(arrays)
        mesh, self._mapping = sync.placement.mesh, sync.placement.mapping
        # Given, or raw arrays would come out replicated: tiny gathers between islands in every step.
        self._state_shardings = sync.placement.shardings(arrays)
        everywhere, own = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((), (ISLAND,)))
        self._inner_shardings, self._sync_shardings = (
            InnerReport(own, own, own),
            SyncReport(own, everywhere, everywhere, everywhere, everywhere),
        )
        # Caches of this object, not of its class, which would keep every run's programs until the process ends.
        self._step_program = cache(self._build_step)
        self._verb_program = cache(self._build_verb)
        self._reduce_program = cache(self._build_reduce)
        self._restart_program = cache(self._build_restart)
        self._mark_settled_program = cache(self._build_mark_settled)

    def step(
        self, state: DiLoCoState, batch: PyTree, *, crossing: Crossing | None, weights: Weights | None, hooks: bool
    ) -> tuple[DiLoCoState, InnerReport, SyncReport | None]:
        """One inner step, with what crosses in it; `weights` are of the fragment that is captured in it."""
        program, *args = self._step_call(state, batch, crossing, weights, hooks)
        leaves, inner, sync = program(*args)
        return self._state(leaves), inner, sync

    def trace_step(
        self, state: DiLoCoState, batch: PyTree, *, crossing: Crossing | None = None, hooks: bool = False
    ) -> jax.stages.Traced:
        """Traces a step program without running it: for its jaxpr and its HLO."""
        program, *args = self._step_call(state, batch, crossing, None, hooks)
        return program.trace(*args)

    def all_steps(self, state: DiLoCoState, batch: PyTree, schedule: Schedule) -> Iterator[StepProgram]:
        """Yields every program that steps of the run consist of, without jit hooks and the final sync."""
        pieces, overlaps = schedule.num_pieces, schedule.overlap_steps > 0
        alone = schedule.effective_period - schedule.num_fragments * pieces
        # A run that syncs in every step takes the inner step alone only before the first overlapped sync.
        if alone or overlaps:
            yield StepProgram("inner", alone, None, partial(self.trace_step, state, batch))
        fragment = 0
        for part, count in self._sync.partition.parts.items():
            for piece in sorted({0, pieces - 1}):
                crossing = Crossing(fragment, piece, piece == pieces - 1)
                name = "reduce" if pieces == 1 else "last piece of" if crossing.last else "piece of"
                runs = count if crossing.last else count * (pieces - 1)
                step = partial(self.trace_step, state, batch, crossing=crossing)
                yield StepProgram(f"inner + {name} {part}", runs, crossing, step)
            for verb in VERBS_OF_OVERLAP if overlaps else ():
                args = self._leaves(state), np.int32(0), self._all_alike(state)
                trace = partial(self._verb_program(verb, part).trace, *args)
                yield StepProgram(f"{verb} {part}", count, None, trace)
            fragment += count

    def apply(
        self, verb: Verb, state: DiLoCoState, fragment: int, weights: Weights | None = None
    ) -> tuple[DiLoCoState, SyncReport | None]:
        """Runs one verb of the sync on `fragment`, apart from an inner step; `weights` for one that captures it."""
        part, index = self._place(fragment)
        weights = self._all_alike(state) if weights is None else weights
        leaves, report = self._verb_program(verb, part)(self._leaves(state), index, weights)
        return self._state(leaves), report

    def reduce_and_step(self, state: DiLoCoState, crossing: Crossing) -> tuple[DiLoCoState, SyncReport | None]:
        """Lets a piece cross apart from an inner step; with the last one its fragment takes the outer step."""
        part, index = self._place(crossing.fragment)
        leaves, report = self._reduce_program(part, crossing.last)(
            self._leaves(state), index, np.int32(crossing.piece)
        )
        return self._state(leaves), report

    def restart(self, state: DiLoCoState, chosen: Bool[np.ndarray, " K"], active: int, *, copied: bool) -> DiLoCoState:
        """Lets the chosen islands start anew from Theta; `active` islands train from now on."""
        return self._state(self._restart_program(copied)(self._leaves(state), chosen, np.int32(active)))

    def mark_settled(self, state: DiLoCoState) -> DiLoCoState:
        """Notes that no capture up to this step has an event left."""
        return self._state(self._mark_settled_program()(self._leaves(state)))

    def _step_call(
        self, state: DiLoCoState, batch: PyTree, crossing: Crossing | None, weights: Weights | None, hooks: bool
    ) -> tuple:
        """The step program and its arguments."""
        part, index = (None, np.int32(0)) if crossing is None else self._place(crossing.fragment)
        piece, last = (0, True) if crossing is None else crossing[1:]
        # A batch has static parts too, such as the names of its axes.
        arrays, static = hashable_partition(batch, _is_array)
        program = self._step_program(part, last, hooks)
        weights = self._all_alike(state) if weights is None else weights
        return program, self._leaves(state), arrays, index, np.int32(piece), weights, static

    @staticmethod
    def _all_alike(state: DiLoCoState) -> Weights:
        return np.ones(state.islands.failed.shape, np.float32)

    def _place(self, fragment: int) -> tuple[str, np.int32]:
        """A fragment's part, and its index as programs take it: on the host, so that it lies on no device before."""
        part, index = self._sync.partition.locate(fragment)
        return part, np.int32(index)

    def _leaves(self, state: DiLoCoState) -> list[jax.Array]:
        return jax.tree.leaves(eqx.filter(state, _is_array))

    def _state(self, leaves: list[jax.Array]) -> DiLoCoState:
        return eqx.combine(self._treedef.unflatten(leaves), self._static)

    def _build_step(self, part: str | None, last: bool, hooks: bool) -> jax.stages.Wrapped:
        def step(
            leaves: list[jax.Array],
            batch: PyTree,
            index: IntScalar,
            piece: IntScalar,
            weights: Float[Array, " K"],
            static: tuple,
        ) -> tuple[list[jax.Array], InnerReport, SyncReport | None]:
            state, batch = self._state(leaves), hashable_combine(batch, static)
            place = None if part is None else Place(part, index)
            report = reduced = None
            with hax.axis_mapping(self._mapping):
                if place is not None and state.captured is not None:
                    # Ahead of forward and backward and unread by them: the exchange may take the whole step.
                    reduced = self._sync.reduce(state, place, piece)
                islands, inner = inner_step(
                    self._trainer, state, batch, islands_per_slot=self._islands_per_slot, hooks=hooks
                )
                islands = self._sync.guard.note_losses(islands, inner.loss)
                state = dataclasses.replace(state, islands=islands, step=state.step + 1)
                if place is not None and reduced is not None:
                    state, report = self._sync.outer_step(state, place, reduced, last)
                elif place is not None:
                    state, report = self._sync.sync(state, place, weights)
            return self._leaves(state), inner, report

        reports = self._sync_shardings if part is not None and last else None
        out_shardings = (self._state_shardings, self._inner_shardings, reports)
        return jax.jit(step, donate_argnums=0, static_argnums=5, out_shardings=out_shardings)

    def _build_verb(self, verb: Verb, part: str) -> jax.stages.Wrapped:
        def apply(
            leaves: list[jax.Array], index: IntScalar, weights: Float[Array, " K"]
        ) -> tuple[list[jax.Array], SyncReport | None]:
            args = () if verb == "merge" else (weights,)
            with hax.axis_mapping(self._mapping):
                out = getattr(self._sync, verb)(self._state(leaves), Place(part, index), *args)
            state, report = out if verb == "sync" else (out, None)
            return self._leaves(state), report

        out_shardings = (self._state_shardings, self._sync_shardings if verb == "sync" else None)
        return jax.jit(apply, donate_argnums=0, out_shardings=out_shardings)

    def _build_reduce(self, part: str, last: bool) -> jax.stages.Wrapped:
        def reduce(
            leaves: list[jax.Array], index: IntScalar, piece: IntScalar
        ) -> tuple[list[jax.Array], SyncReport | None]:
            with hax.axis_mapping(self._mapping):
                state, report = self._sync.reduce_and_step(self._state(leaves), Place(part, index), piece, last)
            return self._leaves(state), report

        out_shardings = (self._state_shardings, self._sync_shardings if last else None)
        return jax.jit(reduce, donate_argnums=0, out_shardings=out_shardings)

    def _build_restart(self, copied: bool) -> jax.stages.Wrapped:
        def restart(leaves: list[jax.Array], chosen: Bool[Array, " K"], active: IntScalar) -> list[jax.Array]:
            with hax.axis_mapping(self._mapping):
                return self._leaves(self._sync.restart(self._state(leaves), chosen, active, copied))

        return jax.jit(restart, donate_argnums=0, out_shardings=self._state_shardings)

    def _build_mark_settled(self) -> jax.stages.Wrapped:
        def mark_settled(leaves: list[jax.Array]) -> list[jax.Array]:
            return self._leaves(self._sync.mark_settled(self._state(leaves)))

        return jax.jit(mark_settled, donate_argnums=0, out_shardings=self._state_shardings)


def _is_array(x: object) -> bool:
    """Whether `x` is an array, or the shape of one: programs are traced from shapes too."""
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)
