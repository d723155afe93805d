"""Names and values of the metrics, and how they reach a tracker without a barrier between islands.

| name | meaning |
|---|---|
| `train/loss` | mean over islands of the inner loss |
| `train/loss_island_<k>` | inner loss of island k |
| `diloco/loss_spread` | largest minus smallest island loss |
| `diloco/synced_fragment` | number of the fragment that took its outer step |
| `diloco/synced_bytes` | bytes an island sent for it |
| `diloco/bytes_per_island` | bytes an island has sent so far |
| `diloco/outer_grad_norm` | norm of the mean outer gradient |
| `diloco/outer_update_norm` | norm of the change of the outer parameters |
| `diloco/island_distance`, `_max` | mean and largest distance of an island to Theta, at the capture |
| `diloco/outer_grad_cosine` | mean pairwise cosine of the islands' outer gradients, weighted by their norms |

The values of a sync are those of the synced fragment. Where several sync in one step (the final sync),
their names end in `/fragment_<f>`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import numpy as np
from haliax.util import is_named_array
from jax._src import distributed  # the host reaches jax.distributed's key-value store in the same way
from jax.sharding import Mesh
from jaxtyping import PyTree
from levanter.tracker import CompositeTracker, Tracker

from .inner import without_island
from .sync import SyncReport


@dataclass
class IslandRecord:
    """What one island has to say of one step."""

    loss: float
    distance: dict[int, float] = field(default_factory=dict)
    """By synced fragment, `|Delta_k|`."""


@dataclass(frozen=True)
class SyncRecord:
    """What every process knows of one fragment's sync."""

    outer_grad_norm: float
    outer_update_norm: float
    synced_bytes: int


@dataclass
class StepRecord:
    """One step: the islands of this process, the syncs, and the bytes each island has sent so far."""

    islands: dict[int, IslandRecord]
    syncs: dict[int, SyncRecord]
    bytes_per_island: int

    def add_sync(self, fragment: int, report: SyncReport, synced_bytes: int) -> None:
        """Takes in the report of one fragment's sync."""
        norms = float(report.outer_grad_norm), float(report.outer_update_norm)
        self.syncs[fragment] = SyncRecord(*norms, synced_bytes)
        for island, distance in local_values(report.island_distance).items():
            if island in self.islands:
                self.islands[island].distance[fragment] = distance


def metrics_of(islands: Mapping[int, IslandRecord], step: StepRecord, complete: bool = True) -> dict[str, float]:
    """Returns the metrics of one step from the records of its islands; `complete` if none is missing."""
    losses = {island: record.loss for island, record in sorted(islands.items())}
    metrics: dict[str, float] = {"diloco/bytes_per_island": step.bytes_per_island}
    if not losses:  # an island that spans processes speaks through one of them
        return metrics
    metrics |= {f"train/loss_island_{island}": loss for island, loss in losses.items()}
    metrics["train/loss"] = float(np.mean(list(losses.values())))
    metrics["diloco/loss_spread"] = max(losses.values()) - min(losses.values())
    for fragment, sync in step.syncs.items():
        distances = [record.distance[fragment] for record in islands.values()]
        values = {
            "synced_fragment": fragment,
            **asdict(sync),
            "island_distance": float(np.mean(distances)),
            "island_distance_max": max(distances),
        }
        if complete and len(distances) > 1:
            values["outer_grad_cosine"] = mean_cosine(np.array(distances), sync.outer_grad_norm)
        suffix = f"/fragment_{fragment}" if len(step.syncs) > 1 else ""
        metrics |= {f"diloco/{name}{suffix}": value for name, value in values.items()}
    return metrics


def mean_cosine(norms: np.ndarray, mean_norm: float) -> float:
    """Mean pairwise cosine of K vectors, weighted by the products of their norms, from K + 1 norms alone.

    `|sum v|^2 = sum |v|^2 + sum_{j!=k} v_j.v_k`, so no vector has to cross an island for it. For K = 2 it is
    the cosine.

    Args:
        norms: `|v_k|`, shape `[K]`.
        mean_norm: Norm of the mean of the vectors.
    """
    dots = (len(norms) * mean_norm) ** 2 - np.sum(norms**2)
    products = np.sum(norms) ** 2 - np.sum(norms**2)
    return float(dots / products) if products > 0 else 0.0


def local_values(per_island: jax.Array) -> dict[int, float]:
    """Reads `{island: value}` of an array `[K]` from the devices of this process; no transfer between islands."""
    values: dict[int, float] = {}
    for shard in per_island.addressable_shards:
        first = shard.index[0].start or 0
        if first not in values:
            values |= {first + i: float(value) for i, value in enumerate(np.asarray(shard.data))}
    return values


def first_local(tree: PyTree) -> PyTree:
    """Returns the values of this process's first island, without the island axis."""

    def first(x: jax.Array) -> np.ndarray:
        return np.asarray(min(x.addressable_shards, key=lambda shard: shard.index[0].start or 0).data)[0]

    return jax.tree.map(without_island, jax.tree.map(first, tree), is_leaf=is_named_array)


def owned_islands(mesh: Mesh, islands_per_slot: int) -> set[int]:
    """Islands that this process speaks for: those of slots in which no process has a lower index."""
    slots = [
        slot
        for slot, devices in enumerate(mesh.devices)
        if min(device.process_index for device in devices.flat) == jax.process_index()
    ]
    return {slot * islands_per_slot + i for slot in slots for i in range(islands_per_slot)}


class Board:
    """Where processes leave their islands' records for each other, on the host side.

    `jax.distributed`'s key-value store: to post and to look never waits for anyone.
    """

    def __init__(self, run_id: str, horizon: int):
        """Args:
        run_id: Names the run in the store.
        horizon: Steps after which a record is taken down: two effective periods, since a sync ends
            any larger lead of one process over another.
        """
        client = distributed.global_state.client
        assert client is not None  # there are several processes
        self._client = client
        self._prefix = f"levanter_diloco/{run_id}"
        self._horizon = horizon

    def post(self, step: int, islands: Mapping[int, IslandRecord]) -> None:
        records = json.dumps({island: asdict(record) for island, record in islands.items()})
        self._client.key_value_set(f"{self._prefix}/{step}/{jax.process_index()}", records)
        if step >= self._horizon:
            self._client.key_value_delete(f"{self._prefix}/{step - self._horizon}/{jax.process_index()}")

    def look(self, step: int) -> dict[int, IslandRecord]:
        found: dict[int, IslandRecord] = {}
        for _, records in self._client.key_value_dir_get(f"{self._prefix}/{step}/"):
            for island, record in json.loads(records).items():
                distance = {int(fragment): value for fragment, value in record["distance"].items()}
                found[int(island)] = IslandRecord(record["loss"], distance)
        return found


class IslandTracker(CompositeTracker):
    """The run's trackers, with the islands' metrics added to each step.

    With a board, everything logged for a step is held until all islands have reported it, so that trackers
    see whole steps in order, a little late. Remembers the last evaluation loss.
    """

    def __init__(self, loggers: list[Tracker], num_islands: int, board: Board | None):
        super().__init__(loggers)
        self.eval_loss: float | None = None
        self._num_islands = num_islands
        self._board = board
        self._held: dict[int, dict[str, Any]] = {}  # Any: whatever a hook logs
        self._records: dict[int, StepRecord] = {}

    def report(self, step: int, record: StepRecord) -> None:
        """Takes this process's record of `step`, the tracker's zero-based step."""
        if self._board is None:
            super().log(metrics_of(record.islands, record), step=step)
            return
        self._board.post(step, record.islands)
        self._records[step] = record
        self._release()

    def log(self, metrics: Mapping[str, Any], *, step: int | None, commit: bool | None = None) -> None:
        if "eval/loss" in metrics:
            self.eval_loss = float(metrics["eval/loss"])
        if self._board is None or step is None:
            super().log(metrics, step=step, commit=commit)
        else:
            self._held.setdefault(step, {}).update(metrics)

    def finish(self) -> None:
        if self._board is not None:
            self._release(everything=True)
        super().finish()

    def _release(self, everything: bool = False) -> None:
        newest = max(self._records, default=-1)
        for step in sorted(self._held.keys() | self._records.keys()):
            record = self._records.get(step)
            islands = {} if record is None or self._board is None else self._board.look(step)
            # The newest step is still being logged; an older one waits for the slowest island.
            if not everything and (step >= newest or (record is not None and len(islands) < self._num_islands)):
                return
            complete = len(islands) == self._num_islands
            own = {} if record is None else metrics_of(islands, self._records.pop(step), complete)
            super().log({**self._held.pop(step, {}), **own}, step=step)
