"""Names and values of the metrics.

| name | meaning |
|---|---|
| `train/loss` | mean over islands of the inner loss, of those where it is finite |
| `train/loss_island_<k>` | inner loss of island k |
| `diloco/loss_spread` | largest minus smallest island loss |
| `diloco/participants` | islands in the mean of a sync |
| `diloco/left_out` | islands that the guard left out of it |
| `diloco/synced_fragment` | number of the fragment that took its outer step |
| `diloco/synced_bytes` | bytes an island sent for it |
| `diloco/bytes_per_island` | bytes an island has sent so far |
| `diloco/outer_grad_norm` | norm of the mean outer gradient |
| `diloco/outer_update_norm` | norm of the change of the outer parameters |
| `diloco/island_distance`, `_max` | mean and largest distance of an island to Theta, at the capture |
| `diloco/outer_grad_cosine` | mean pairwise cosine of the islands' outer gradients, weighted by their norms |

The values of a sync are those of the synced fragment. Where several sync in one step (the final sync),
their names end in `/fragment_<f>`. Those of the islands are of those in the mean.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from haliax.util import is_named_array
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..axes import without_island
from ..islands.byte_count import count_of
from ..islands.state import Status
from ..islands.sync import SyncReport


@dataclass
class IslandRecord:
    """What one island has to say of one step."""

    loss: float | None
    """`None` for one that has left since the capture of a fragment that is synced now."""

    distance: dict[int, float] = field(default_factory=dict)
    """By synced fragment, `|Delta_k|`."""


@dataclass(frozen=True)
class SyncRecord:
    """What every process knows of one fragment's sync."""

    outer_grad_norm: float
    outer_update_norm: float
    synced_bytes: int
    weights: tuple[float, ...]
    """Of all islands; 0 for one that is not in the mean."""

    status: tuple[int, ...] = ()
    """A `Status` for each of them; none: all counted."""

    @property
    def participants(self) -> list[int]:
        """The islands in the mean."""
        return [island for island, weight in enumerate(self.weights) if weight > 0]

    @property
    def left_out(self) -> list[int]:
        """The islands that the guard left out."""
        return [island for island, status in enumerate(self.status) if status != Status.COUNTED]

    @property
    def broken(self) -> list[int]:
        """Those of them that have not yet started anew."""
        return [island for island, status in enumerate(self.status) if status == Status.LEFT_OUT]


@dataclass
class StepRecord:
    """One step: what this process's islands say of it, the syncs, and the bytes each island has sent so far."""

    islands: dict[int, IslandRecord]
    syncs: dict[int, SyncRecord]
    bytes_per_island: int
    active: int
    """How many islands train."""

    @property
    def speakers(self) -> set[int]:
        """The islands of the run that have something to say of it: those that train, and those in the mean."""
        return set(range(self.active)).union(*(sync.participants for sync in self.syncs.values()))

    def add_sync(self, fragment: int, report: SyncReport, owned: Collection[int]) -> SyncRecord:
        """Takes in the report of one fragment's sync, with the distances of the islands `owned` by this process."""
        norms = float(report.outer_grad_norm), float(report.outer_update_norm)
        weights, status = (tuple(np.asarray(x).tolist()) for x in report.attendance)
        self.syncs[fragment] = SyncRecord(*norms, count_of(report.sent_bytes), weights, status)
        # Participation is fixed at the capture: one that has left since is in the mean, and in what is said of it.
        for island, distance in local_values(report.island_distance).items():
            if island in self.speakers.intersection(owned):
                self.islands.setdefault(island, IslandRecord(None)).distance[fragment] = distance
        return self.syncs[fragment]


def metrics_of(islands: Mapping[int, IslandRecord], step: StepRecord) -> dict[str, float]:
    """Returns the metrics of one step from the records of its islands."""
    losses = {island: record.loss for island, record in sorted(islands.items()) if record.loss is not None}
    metrics: dict[str, float] = {"diloco/bytes_per_island": step.bytes_per_island}
    if not losses:  # an island that spans processes speaks through one of them
        return metrics
    metrics |= {f"train/loss_island_{island}": loss for island, loss in losses.items()}
    metrics["train/loss"] = mean_loss(losses.values())
    metrics["diloco/loss_spread"] = max(losses.values()) - min(losses.values())
    for fragment, sync in step.syncs.items():
        values = _sync_metrics(islands, fragment, sync)
        suffix = f"/fragment_{fragment}" if len(step.syncs) > 1 else ""
        metrics |= {f"diloco/{name}{suffix}": value for name, value in values.items()}
    return metrics


def mean_loss(losses: Iterable[float]) -> float:
    """Mean of the losses that are finite; NaN if none is."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return float(np.mean(finite)) if finite else math.nan


def _sync_metrics(islands: Mapping[int, IslandRecord], fragment: int, sync: SyncRecord) -> dict[str, float]:
    values: dict[str, float] = {
        "synced_fragment": fragment,
        "synced_bytes": sync.synced_bytes,
        "outer_grad_norm": sync.outer_grad_norm,
        "outer_update_norm": sync.outer_update_norm,
        "participants": len(sync.participants),
        "left_out": len(sync.left_out),
    }
    known = {island: islands[island].distance for island in sync.participants if island in islands}
    present = [island for island, distance in known.items() if fragment in distance]
    if not present:
        return values
    distances = np.array([known[island][fragment] for island in present])
    values |= {"island_distance": float(np.mean(distances)), "island_distance_max": float(max(distances))}
    # The mean's norm is of all participants: with one missing, the cosine of the others would be wrong.
    if len(present) == len(sync.participants) > 1:
        # What was added up is w_k*Delta_k, so the cosine is of these.
        weights = np.array([sync.weights[island] for island in present])
        values["outer_grad_cosine"] = mean_cosine(distances * weights / np.mean(weights), sync.outer_grad_norm)
    return values


def mean_cosine(norms: np.ndarray, mean_norm: float) -> float:
    """Mean pairwise cosine of K vectors, weighted by the products of their norms, from K + 1 norms alone.

    `|sum v|^2 = sum |v|^2 + sum_{j!=k} v_j.v_k`, so no vector has to cross an island for it. For K = 2 it is
    the cosine.

    Args:
        norms: `|v_k|`, shape `[K]`.
        mean_norm: Norm of the mean of the vectors.
    """
    # |K*mean|^2 less the squares: the sum over pairs j != k of v_j.v_k.
    dots = (len(norms) * mean_norm) ** 2 - np.sum(norms**2)
    products = np.sum(norms) ** 2 - np.sum(norms**2)
    return float(dots / products) if products > 0 else 0.0


def local_values(per_island: jax.Array) -> dict[int, float]:
    """Reads `{island: value}` of an array `[K]` from the devices of this process; no transfer between islands."""
    values: dict[int, float] = {}
    for shard in per_island.addressable_shards:
        first = shard.index[0].start or 0
        # Copies of a shard lie on several devices of an island; one speaks for it.
        if first not in values:
            values |= {first + i: float(value) for i, value in enumerate(np.asarray(shard.data))}
    return values


def first_local(tree: PyTree) -> PyTree:
    """Returns the values of this process's first island, without the island axis."""

    def first(x: jax.Array) -> np.ndarray:
        return np.asarray(min(x.addressable_shards, key=lambda shard: shard.index[0].start or 0).data)[0]

    return jax.tree.map(without_island, jax.tree.map(first, tree), is_leaf=is_named_array)


def inner_hyperparameters(opt_state: Any) -> Any:  # Any: what the host's `log_optimizer_hyperparams` looks into
    """The hyperparameters in the islands' optimizer state, as one island has them; the host looks in the outer one."""
    # Some of the host's optimizers wrap their state once more.
    inner = getattr(opt_state, "inner_opt_state", opt_state)
    return SimpleNamespace(hyperparams=first_local(getattr(inner, "hyperparams", {})))


def owned_islands(mesh: Mesh, islands_per_slot: int) -> set[int]:
    """Islands that this process speaks for: those of slots in which no process has a lower index."""
    slots = [
        slot
        for slot, devices in enumerate(mesh.devices)
        if min(device.process_index for device in devices.flat) == jax.process_index()
    ]
    return {slot * islands_per_slot + i for slot in slots for i in range(islands_per_slot)}
