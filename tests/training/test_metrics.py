"""Metrics of a step, by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from helpers.step_records import record
from levanter_diloco.islands.byte_count import words_of
from levanter_diloco.islands.state import Status
from levanter_diloco.islands.sync import Attendance, SyncReport
from levanter_diloco.training.metrics import (
    IslandRecord,
    StepRecord,
    SyncRecord,
    first_local,
    local_values,
    mean_cosine,
    metrics_of,
    owned_islands,
)

LOSSES_AND_DISTANCES = ((1.0, 3.0), (2.0, 9.0), (float("nan"), float("nan")), (3.0, 4.0))


def pairwise_cosine(vectors: np.ndarray) -> float:
    """Mean over pairs of islands, weighted by the products of the norms."""
    pairs = [(a, b) for a in range(len(vectors)) for b in range(a)]
    norms = np.linalg.norm(vectors, axis=1)
    return sum(vectors[a] @ vectors[b] for a, b in pairs) / sum(norms[a] * norms[b] for a, b in pairs)


def cosine_from_norms(vectors: np.ndarray) -> float:
    return mean_cosine(np.linalg.norm(vectors, axis=1), float(np.linalg.norm(vectors.mean(axis=0))))


@pytest.mark.parametrize(
    ("vectors", "cosine"),
    [
        ([[3, 0], [0, 4]], 0.0),  # |mean| = 2.5: (2*2.5)^2 - 25 = 0
        ([[1, 0], [2, 0]], 1.0),
        ([[1, 0], [-2, 0]], -1.0),
        ([[2, 0], [1, 1]], 2**-0.5),
        ([[1, 0], [0, 1], [-1, 0], [0, -1]], -1 / 3),  # of 6 pairs 4 are orthogonal and 2 opposite
        ([[1, 0], [1, 0], [1, 0], [0, 1]], 0.5),
    ],
)
def test_mean_cosine_by_hand(vectors: list[list[float]], cosine: float):
    assert cosine_from_norms(np.array(vectors, float)) == pytest.approx(cosine, abs=1e-12)


def test_mean_cosine_of_islands_that_did_not_move_is_zero():
    assert mean_cosine(np.zeros(4), 0.0) == 0.0
    assert mean_cosine(np.array([1.0, 0.0]), 0.5) == 0.0


coordinates = st.floats(-8, 8, width=32).map(lambda x: x + 0.0625 if abs(x) < 0.03 else x)


@given(arrays(float, (2, 5), elements=coordinates))
def test_mean_cosine_of_two_islands_is_their_cosine(vectors: np.ndarray):
    assert cosine_from_norms(vectors) == pytest.approx(pairwise_cosine(vectors), abs=1e-9)


@given(arrays(float, (4, 5), elements=coordinates))
def test_mean_cosine_of_equal_norms_is_the_plain_mean_over_pairs(vectors: np.ndarray):
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    plain = np.mean([units[a] @ units[b] for a in range(4) for b in range(a)])
    assert cosine_from_norms(3 * units) == pytest.approx(plain, abs=1e-9)
    assert cosine_from_norms(vectors) == pytest.approx(pairwise_cosine(vectors), abs=1e-9)


def test_metrics_without_a_sync_are_the_losses():
    assert metrics_of(record({0: 1.0, 1: 4.0}).islands, record({}, sent=7)) == {
        "train/loss": 2.5,
        "train/loss_island_0": 1.0,
        "train/loss_island_1": 4.0,
        "diloco/loss_spread": 3.0,
        "diloco/bytes_per_island": 7,
    }


def test_metrics_of_a_sync_by_hand():
    # |Delta_0| = 3, |Delta_1| = 4 at a right angle: the mean has norm 2.5.
    islands = {1: IslandRecord(4.0, {2: 4.0}), 0: IslandRecord(1.0, {2: 3.0})}
    metrics = metrics_of(islands, StepRecord(islands, {2: SyncRecord(2.5, 1.75, 48, (1.0, 1.0))}, 480, 2))
    assert metrics == {
        "train/loss": 2.5,
        "train/loss_island_0": 1.0,
        "train/loss_island_1": 4.0,
        "diloco/loss_spread": 3.0,
        "diloco/synced_fragment": 2,
        "diloco/synced_bytes": 48,
        "diloco/bytes_per_island": 480,
        "diloco/participants": 2,
        "diloco/left_out": 0,
        "diloco/outer_grad_norm": 2.5,
        "diloco/outer_update_norm": 1.75,
        "diloco/island_distance": 3.5,
        "diloco/island_distance_max": 4.0,
        "diloco/outer_grad_cosine": 0.0,
    }


def test_metrics_of_one_island_have_no_cosine():
    islands = {0: IslandRecord(1.0, {0: 3.0})}
    metrics = metrics_of(islands, StepRecord(islands, {0: SyncRecord(3.0, 1.0, 4, (1.0,))}, 4, 1))
    assert "diloco/outer_grad_cosine" not in metrics
    assert metrics["diloco/island_distance"] == metrics["diloco/island_distance_max"] == 3.0


def test_metrics_of_several_syncs_in_a_step_are_named_by_fragment():
    islands = {0: IslandRecord(1.0, {0: 3.0, 2: 5.0})}
    syncs = {0: SyncRecord(3.0, 1.0, 4, (1.0,)), 2: SyncRecord(5.0, 2.0, 8, (1.0,))}
    metrics = metrics_of(islands, StepRecord(islands, syncs, 12, 1))
    assert metrics["diloco/synced_fragment/fragment_0"] == 0
    assert metrics["diloco/synced_fragment/fragment_2"] == 2
    assert metrics["diloco/outer_grad_norm/fragment_2"] == 5.0
    assert metrics["diloco/synced_bytes/fragment_2"] == 8
    assert "diloco/outer_grad_norm" not in metrics


def on_islands(values: Any) -> jax.Array:
    """Leading axis over four islands of two devices each."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("diloco", "data"))
    return jax.device_put(jnp.asarray(values), NamedSharding(mesh, PartitionSpec("diloco")))


def test_local_values_are_read_by_island():
    assert local_values(on_islands([1.0, 2.0, 3.0, 4.0])) == {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}
    # Two islands on each slot.
    assert local_values(on_islands(np.arange(8.0))) == {island: float(island) for island in range(8)}


def test_first_local_is_island_0_without_its_axis():
    first = first_local(
        {"rate": on_islands([0.5, 0.25, 0.125, 0.0]), "table": on_islands(np.arange(8.0).reshape(4, 2))}
    )
    assert first["rate"] == 0.5
    assert first["table"].tolist() == [0.0, 1.0]


def test_one_process_owns_all_islands():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("diloco", "data"))
    assert owned_islands(mesh, 1) == set(range(4))
    assert owned_islands(mesh, 2) == set(range(8))


def test_step_record_takes_in_the_distances_of_its_own_islands():
    step = record({0: 1.0, 2: 2.0}, active=4)
    attendance = Attendance(jnp.array([1.0, 0.0, 0.0, 1.0]), jnp.array([0, 0, 1, 0], jnp.int8))
    distances = on_islands([1.0, 2.0, 3.0, 4.0])
    report = SyncReport(distances, jnp.float32(0.5), jnp.float32(0.25), attendance, words_of(2**40 + 16))
    step.add_sync(3, report, owned={0, 2})
    assert step.syncs == {3: SyncRecord(0.5, 0.25, 2**40 + 16, (1.0, 0.0, 0.0, 1.0), (0, 0, 1, 0))}
    assert step.syncs[3].left_out == step.syncs[3].broken == [2]
    assert {island: own.distance for island, own in step.islands.items()} == {0: {3: 1.0}, 2: {3: 3.0}}


def test_metrics_of_a_sync_are_of_the_islands_in_the_mean():
    # Island 1 was absent, the guard left island 2 out, which has lost its numbers; 0 and 3 stand at a right angle.
    islands = {k: IslandRecord(loss, {0: distance}) for k, (loss, distance) in enumerate(LOSSES_AND_DISTANCES)}
    sync = SyncRecord(2.5, 1.0, 8, (1.0, 0.0, 0.0, 1.0), (0, 0, Status.LEFT_OUT, 0))
    metrics = metrics_of(islands, StepRecord(islands, {0: sync}, 8, 4))
    assert (metrics["diloco/participants"], metrics["diloco/left_out"]) == (2, 1)
    assert (metrics["diloco/island_distance"], metrics["diloco/island_distance_max"]) == (3.5, 4.0)
    assert metrics["diloco/outer_grad_cosine"] == 0.0
    assert metrics["train/loss"] == 2.0
    assert np.isnan(metrics["train/loss_island_2"])


def test_metrics_of_a_sync_without_participants():
    islands = {0: IslandRecord(1.0, {0: 3.0})}
    metrics = metrics_of(islands, StepRecord(islands, {0: SyncRecord(0.0, 0.0, 8, (0.0,))}, 8, 1))
    assert metrics["diloco/participants"] == 0
    assert not any(name.startswith("diloco/island_distance") for name in metrics)


def test_cosine_of_weighted_islands_is_that_of_what_was_added_up():
    # Weights 3 and 1 on vectors (1, 0) and (3, 4): the mean is (1.5, 1), and the cosine of the two is 3/5.
    islands = {0: IslandRecord(1.0, {0: 1.0}), 1: IslandRecord(1.0, {0: 5.0})}
    sync = SyncRecord(float(np.hypot(1.5, 1.0)), 1.0, 8, (1.0, 1 / 3))
    metrics = metrics_of(islands, StepRecord(islands, {0: sync}, 8, 2))
    assert metrics["diloco/outer_grad_cosine"] == pytest.approx(0.6)
