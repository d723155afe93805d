"""Compiled programs on the training state.

Three step programs, whatever P is: inner; inner + reduce of a layer fragment, its index traced; inner +
reduce of the rest. Which one runs is host arithmetic, so no program holds a branch.
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
from jaxtyping import PyTree
from levanter.trainer import Trainer

from .inner import InnerReport, inner_step
from .mesh import state_shardings
from .outer import ISLAND
from .state import LAYERS, REST, DiLoCoState
from .sync import Sync, SyncReport

Part = Literal["rest", "layers"]

Kind = Literal["keep", "merge", "reduce_kept", "whole", "settle"]
"""A method of `Sync`."""


class StepProgram(NamedTuple):
    """A program that a step of the run may consist of."""

    name: str
    part: Part | None
    """What it syncs: it runs once a period for each fragment of that part, or in the steps without a sync."""

    reduces: int | None
    """The first of the fragments that it reduces, if any."""

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
        arrays, self._static = eqx.partition(state, _is_array)
        self._treedef = jax.tree.structure(arrays)
        self._state_shardings = state_shardings(arrays, sync.mesh, sync.mapping)
        everywhere, own = (NamedSharding(sync.mesh, PartitionSpec(*spec)) for spec in ((), (ISLAND,)))
        self._inner_shardings, self._sync_shardings = (
            InnerReport(own, own, own),
            SyncReport(own, everywhere, everywhere),
        )

    def step(
        self, state: DiLoCoState, batch: PyTree, *, reduce: int | None, hooks: bool
    ) -> tuple[DiLoCoState, InnerReport, SyncReport | None]:
        """One inner step, with the outer step of fragment `reduce` if one is due."""
        part, index = _part_of(reduce)
        arrays, static = hashable_partition(batch, _is_array)
        leaves, inner, sync = self._step_program(part, hooks)(self._leaves(state), arrays, index, static)
        return self._state(leaves), inner, sync

    def trace_step(
        self, state: DiLoCoState, batch: PyTree, *, reduce: int | None = None, hooks: bool = False
    ) -> jax.stages.Traced:
        """Traces a step program without running it: for its jaxpr and its HLO."""
        part, index = _part_of(reduce)
        arrays, static = hashable_partition(batch, _is_array)
        return self._step_program(part, hooks).trace(self._leaves(state), arrays, index, static)

    def trace(self, kind: Kind, state: DiLoCoState, fragment: int) -> jax.stages.Traced:
        """Traces one verb of the sync, as `apply` runs it."""
        part, index = _part_of(fragment)
        return self._sync_program(kind, part).trace(self._leaves(state), index)

    def all_steps(self, state: DiLoCoState, batch: PyTree) -> Iterator[StepProgram]:
        """Yields every program that steps of the run consist of, without jit hooks and the final sync."""
        yield StepProgram("inner", None, None, partial(self.trace_step, state, batch))
        parts: list[Part] = [REST] if self._sync.partition.Fragment is None else [REST, LAYERS]
        for fragment, part in enumerate(parts):
            step = partial(self.trace_step, state, batch, reduce=fragment)
            yield StepProgram(f"inner + reduce {part}", part, fragment, step)
            kinds: list[Kind] = [] if state.captured is None else ["merge", "keep"]
            for kind in kinds:
                yield StepProgram(f"{kind} {part}", part, None, partial(self.trace, kind, state, fragment))

    def apply(self, kind: Kind, state: DiLoCoState, fragment: int) -> tuple[DiLoCoState, SyncReport | None]:
        """Runs one verb of the sync on `fragment`, apart from an inner step."""
        part, index = _part_of(fragment)
        leaves, report = self._sync_program(kind, part)(self._leaves(state), index)
        return self._state(leaves), report

    def _leaves(self, state: DiLoCoState) -> list[jax.Array]:
        return jax.tree.leaves(eqx.filter(state, _is_array))

    def _state(self, leaves: list[jax.Array]) -> DiLoCoState:
        return eqx.combine(self._treedef.unflatten(leaves), self._static)

    @cache  # noqa: B019  as long-lived as the run
    def _step_program(self, part: Part | None, hooks: bool) -> jax.stages.Wrapped:
        def step(
            leaves: list[jax.Array], batch: PyTree, index: IntScalar, static: tuple
        ) -> tuple[list[jax.Array], InnerReport, SyncReport | None]:
            state, batch = self._state(leaves), hashable_combine(batch, static)
            layer = index if part == LAYERS else None
            kept = state.captured[part] if part is not None and state.captured is not None else None
            report = gradient = None
            with hax.axis_mapping(self._sync.mapping):
                if kept is not None:
                    # Ahead of forward and backward and unread by them: the exchange may take the whole step.
                    gradient = self._sync.reduce(kept)
                islands, inner = inner_step(
                    self._trainer, state, batch, islands_per_slot=self._islands_per_slot, hooks=hooks
                )
                state = dataclasses.replace(state, islands=islands, step=state.step + 1)
                if kept is not None:
                    state, report = self._sync.outer_step(state, layer, kept, gradient)
                elif part is not None:
                    state, report = self._sync.whole(state, layer)
            return self._leaves(state), inner, report

        sync_shardings = None if part is None else self._sync_shardings
        out_shardings = (self._state_shardings, self._inner_shardings, sync_shardings)
        return jax.jit(step, donate_argnums=0, static_argnums=3, out_shardings=out_shardings)

    @cache  # noqa: B019
    def _sync_program(self, kind: Kind, part: Part | None) -> jax.stages.Wrapped:
        reports = kind in ("reduce_kept", "whole")

        def apply(leaves: list[jax.Array], index: IntScalar) -> tuple[list[jax.Array], SyncReport | None]:
            with hax.axis_mapping(self._sync.mapping):
                out = getattr(self._sync, kind)(self._state(leaves), index if part == LAYERS else None)
            state, report = out if reports else (out, None)
            return self._leaves(state), report

        out_shardings = (self._state_shardings, self._sync_shardings if reports else None)
        return jax.jit(apply, donate_argnums=0, out_shardings=out_shardings)


def _part_of(fragment: int | None) -> tuple[Part | None, np.int32]:
    """The part that holds `fragment`, and its index among the layer fragments (0 where it means nothing)."""
    if not fragment:
        return (None if fragment is None else REST), np.int32(0)
    return LAYERS, np.int32(fragment - 1)


def _is_array(x: object) -> bool:
    """Whether `x` is an array, or the shape of one: programs are traced from shapes too."""
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)
