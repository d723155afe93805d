"""The layout of a state: what shapes it and its events, as a run has it and as a checkpoint stores it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ..algorithm.schedule import Schedule
from ..fragments.build import build_partition
from ..fragments.partition import Partition
from ..options.config import DiLoCoConfig

SHARDS = "shards_of_"
"""Prefix of the facts that say over how many devices of an island a named axis is split."""


@dataclass(frozen=True)
class Layout:
    """What shapes a state and its events, beside the model and the optimizers."""

    diloco: DiLoCoConfig
    num_islands: int
    """K."""

    sharding: Mapping[str, int] = field(hash=False)
    """Over how many devices of an island each named axis of a parameter is split, where it is."""

    @cached_property
    def partition(self) -> Partition:
        return build_partition(self.diloco, self.sharding)

    @property
    def facts(self) -> dict[str, int]:
        """The layout as a checkpoint stores it."""
        return {
            "islands": self.num_islands,
            "num_fragments": self.diloco.num_fragments,
            "sequential_layers": int(self.diloco.layer_order == "sequential"),
            "balanced": int(self.diloco.partition == "balanced"),
            "overlap_steps": self.diloco.overlap_steps,
            "error_feedback": int(self.diloco.error_feedback),
            # Pieces of shares hold other elements than pieces of all, so neither can complete one of the other.
            "pieces_of_shares": int(self.diloco.outer_memory == "sharded" and self.diloco.schedule.num_pieces > 1),
            "sync_period": self.diloco.sync_period,
            **{SHARDS + axis: size for axis, size in self.partition.sharding.items()},
        }

    @classmethod
    def stored(cls, facts: Mapping[str, int], diloco: DiLoCoConfig) -> "Layout":
        """The layout that a checkpoint's facts tell of; what does not shape it is as in `diloco`."""
        sharded = diloco.outer_memory == "sharded"
        block = dataclasses.replace(
            diloco,
            sync_period=facts["sync_period"],
            num_fragments=facts["num_fragments"],
            layer_order="sequential" if facts["sequential_layers"] else "interleaved",
            partition="balanced" if facts["balanced"] else "layers",
            overlap_steps=facts["overlap_steps"],
            error_feedback=bool(facts["error_feedback"]),
            wire="int8" if facts["error_feedback"] else diloco.wire,  # any that loses something, as its rule wants
            outer_memory="sharded" if facts["pieces_of_shares"] else "device" if sharded else diloco.outer_memory,
        )
        shards = {name.removeprefix(SHARDS): size for name, size in facts.items() if name.startswith(SHARDS)}
        return cls(block, facts["islands"], shards)


class InFlight(NamedTuple):
    """What is under way in a state."""

    merging: list[int]
    """Fragments whose outer step is done and whose merge is not."""

    crossing: list[int]
    """Fragments that have not crossed whole: one at most."""

    begun: bool
    """Whether a piece of that one has crossed."""

    @classmethod
    def of(cls, schedule: Schedule, step: int, since: int) -> "InFlight":
        # One fragment crosses at a time, so one at most is left to cross.
        left = schedule.to_cross(step, since)
        crossing = [left[0].fragment] if left else []
        merging = [fragment for _, fragment in schedule.unmerged(step, since) if fragment not in crossing]
        return cls(merging, crossing, bool(left) and left[0].piece > 0)


def explain(before: Layout, after: Layout, in_flight: InFlight) -> str:
    """Says in one line what changes and what becomes of the state."""
    old, new = before.facts, after.facts
    changed = [
        f"{name} {old.get(name, 1)} -> {new.get(name, 1)}" for name in old | new if old.get(name) != new.get(name)
    ]
    said = [f"{', '.join(changed)}: Theta and the outer optimizer's state carry over, element by element"]
    islands = before.num_islands != after.num_islands
    said.append(f"islands start by resume_islands {after.diloco.resume_islands}" if islands else "islands go on")
    if in_flight.merging:
        said.append(f"fragments {in_flight.merging} in flight are merged now")
    if in_flight.crossing:
        said.append(f"fragment {in_flight.crossing[0]} in flight is dropped, its progress goes into its next sync")
    if after.diloco.error_feedback and (islands or not before.diloco.error_feedback):
        said.append("error feedback starts at zero")
    return "; ".join(said)
