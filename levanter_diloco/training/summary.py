"""The summary of a run: its figures and warnings before the first step, and three lines at its end."""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

import equinox as eqx
import jax
from humanfriendly import format_size
from jaxtyping import PyTree

from ..axes import Params
from ..errors import PATH
from ..fragments.partition import Partition, Place
from ..islands.state import DiLoCoState, frozen_only
from ..islands.sync import Sync
from ..options.config import DiLoCoConfig
from .config import DiLoCoTrainerConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Traffic:
    """Bytes an island sends: the payload it hands to the network, whatever the collective makes of it."""

    by_fragment: tuple[int, ...]
    """One sync of each fragment, on the wire as it is."""

    data_parallel: int
    """One step of data-parallel training: a gradient in the parameter dtype."""

    alone: bool = False
    """Whether there is one island, which sends nothing."""

    @classmethod
    def of(cls, state: DiLoCoState, sync: Sync) -> "Traffic":
        by_fragment: list[int] = []
        for part, count in sync.partition.parts.items():
            gradients = eqx.filter_eval_shape(sync.displacement, state, Place(part, 0))
            by_fragment += [sync.all_reduce.payload_bytes(gradients)] * count
        num_islands = state.islands.key.shape[0]
        gradient = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.islands.params)) // num_islands
        return cls(tuple(by_fragment), gradient, num_islands == 1)

    def of_sync(self, fragment: int) -> int:
        """Bytes an island sends for one sync of `fragment`."""
        return 0 if self.alone else self.by_fragment[fragment]


def announce(
    config: DiLoCoTrainerConfig, state: DiLoCoState, partition: Partition, traffic: Traffic
) -> dict[str, int]:
    """Logs the summary and its warnings, and returns its figures for the tracker."""
    schedule, islands = config.diloco.schedule, config.islands
    outer = state.theta
    figures = {
        "islands": islands.num_islands,
        "islands_per_slot": islands.per_slot,
        "devices_per_slot": config.device_mesh.size // islands.num_slots,
        "num_fragments": schedule.num_fragments,
        "steps_per_sync": schedule.steps_per_sync,
        "effective_period": schedule.effective_period,
        "bytes_per_sync": max(traffic.by_fragment),
        "bytes_per_period": sum(traffic.by_fragment),
        "data_parallel_bytes_per_period": traffic.data_parallel * schedule.effective_period,
        "memory_added_per_device": _memory_added(state, islands.per_slot, "device"),
        "host_memory_added_per_device": _memory_added(state, islands.per_slot, "pinned_host"),
    }
    for line in _lines(config, partition, outer, traffic, figures):
        logger.info(line)
    for warning in cadence_warnings(config):
        logger.warning(warning)
    return {f"diloco/{name}": value for name, value in figures.items()}


def farewell(eval_loss: float | None, traffic: Traffic, sent: int, steps: int, checkpoint: str) -> str:
    """Returns the closing lines of a run of `steps` inner steps, in which an island has sent `sent` bytes."""
    evaluated = "none evaluated" if eval_loss is None else f"{eval_loss:.4f} (perplexity {math.exp(eval_loss):.1f})"
    parallel = traffic.data_parallel * steps
    sizes = [format_size(size, binary=True) for size in (sent, parallel)]
    ratio = f", {parallel / sent:.1f} times less" if sent else ""
    return (
        f"final outer validation loss: {evaluated}\n"
        f"bytes sent per island: {sizes[0]}, against {sizes[1]} of data parallel{ratio}\n"
        f"checkpoint: {checkpoint}"
    )


def cadence_warnings(config: DiLoCoTrainerConfig) -> Iterator[str]:
    """Yields a sentence for each period that is not what its option seems to say."""
    schedule = config.diloco.schedule
    period, spacing = schedule.effective_period, schedule.steps_per_sync
    if period != schedule.sync_period:
        yield (
            f"{PATH}.sync_period ({schedule.sync_period}) takes effect as {period}: {schedule.num_fragments} "
            f"fragments, one every {spacing} step(s). {period} is the nearest that is kept to the step."
        )
    if period > config.num_train_steps:
        yield (
            f"{PATH}.sync_period takes effect as {period}, longer than the run of {config.num_train_steps} steps: not "
            f"every fragment syncs on its way. A period of at most {config.num_train_steps} does."
        )
    if config.diloco.drop_rate == 1:
        yield f"{PATH}.drop_rate (1) loses every outer gradient: the outer model stays as it is. Below 1 it trains."
    # lcm beyond the run: no evaluation ever sees Theta right after a sync.
    if config.steps_per_eval <= config.num_train_steps < math.lcm(config.steps_per_eval, spacing):
        yield (
            f"trainer.steps_per_eval ({config.steps_per_eval}) never falls on a sync (every {spacing} steps): each "
            f"evaluation sees outer parameters that are up to {spacing} steps old. A multiple of {spacing} does."
        )
    for keep in config.checkpointer.keep or []:
        # The host counts from 0, so it saves one step after each multiple.
        saves = range(keep["every"] + 1, config.num_train_steps + 1, keep["every"])
        if saves and min(save % spacing for save in saves) > 1:
            yield (
                f"trainer.checkpointer.keep.every ({keep['every']}) never falls on a sync (every {spacing} steps): "
                f"the outer model of a checkpoint is up to {spacing} steps old. A multiple of {spacing} does."
            )


def _lines(
    config: DiLoCoTrainerConfig, partition: Partition, outer: Params, traffic: Traffic, figures: dict[str, int]
) -> Iterator[str]:
    diloco, islands, mesh = config.diloco, config.islands, config.device_mesh
    yield f"DiLoCo: {islands.num_islands} island(s), {islands.per_slot} on each of {islands.num_slots} mesh slot(s)"
    for slot, devices in enumerate(mesh.devices.reshape(islands.num_slots, -1)):
        first = slot * islands.per_slot
        names = f"island {first}" if islands.per_slot == 1 else f"islands {first}-{first + islands.per_slot - 1}"
        yield f"  {names}: {len(devices)} x {devices[0].device_kind}, ids {devices[0].id}-{devices[-1].id}"
    for fragment, size in enumerate(traffic.by_fragment):
        yield f"  fragment {fragment}: {partition.describe(outer, fragment)}, {format_size(size, binary=True)}"
    yield (
        f"  a sync every {figures['steps_per_sync']} step(s), each fragment every {figures['effective_period']}; "
        f"overlap {diloco.overlap_steps}, alpha {diloco.mixing_alpha:g}, outer {diloco.outer}"
    )
    if said := _unusual(diloco):
        yield f"  {said}"
    sync, period, parallel = (
        format_size(figures[name], binary=True)
        for name in ("bytes_per_sync", "bytes_per_period", "data_parallel_bytes_per_period")
    )
    saved = figures["data_parallel_bytes_per_period"] / figures["bytes_per_period"]
    if traffic.alone:
        yield f"  one island: nothing is sent; data parallel sends {parallel} a period"
    else:
        yield f"  an island sends up to {sync} a sync, {period} a period; data parallel {parallel}, {saved:.1f}x that"
    memory = format_size(figures["memory_added_per_device"], binary=True)
    if on_host := figures["host_memory_added_per_device"]:
        memory += f", and {format_size(on_host, binary=True)} of the host's"
    yield (
        f"  memory added per device: {memory} (outer parameters and optimizer state, captured fragments, and all but "
        "one of the islands that share it)"
    )


def _unusual(diloco: DiLoCoConfig) -> str:
    """The options that have no line of their own, where they are not at their defaults."""
    shown = (
        *("wire", "error_feedback", "outer_memory", "island_data", "drop_rate", "schedule_islands", "join_moments"),
        *("weights", "guard", "guard_factor"),
    )
    usual = DiLoCoConfig()
    options = {name: getattr(diloco, name) for name in shown}
    return ", ".join(f"{name} {value}" for name, value in options.items() if value != getattr(usual, name))


def _memory_added(state: DiLoCoState, islands_per_slot: int, memory: str) -> int:
    """Bytes of `state` in one device's share of `memory`, less those of one island that trains by itself."""
    frozen = eqx.filter(frozen_only(state.model, state.is_trainable), eqx.is_array)
    one_island = _bytes_in(memory, state.islands) // islands_per_slot + _bytes_in(memory, (frozen, state.step))
    return _bytes_in(memory, eqx.filter(state, eqx.is_array)) - one_island


def _bytes_in(memory: str, tree: PyTree) -> int:
    """Bytes that one device holds of those arrays of `tree` that lie in `memory`."""
    held = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind == memory]
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in held)
