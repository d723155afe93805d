"""Metrics of whole runs, by hand."""

from pathlib import Path
from typing import Any

import haliax as hax
import numpy as np
import optax
import pytest

from helpers.toy_model import Toy, run, toy_batch, toy_loss, trainer_config
from helpers.toy_runs import SGD, config_of, mesh, rows, toy
from levanter_diloco.options.outer import SgdConfig

pytestmark = pytest.mark.usefixtures("compile_cache")


def metrics_run(block: dict, tmp_path: Path, steps: int) -> list[dict]:
    """From 0 with sgd(1): after a step island k is at its target, all entries 2 for island 0 and 4 for island 1."""
    config = config_of(tmp_path, {"ici_islands": 2, **block}, mesh=mesh(), train_batch_size=2, num_train_steps=steps)
    batch = toy_batch(np.full((2, 3), [[2.0], [4.0]]), np.full((2, 2, 4), [[[2.0]], [[4.0]]]))
    return [s.metrics for s in run(config, optax.sgd(1.0), Toy.of(np.zeros(3), np.zeros((2, 4))), [batch] * steps)]


def test_metrics_of_vanilla_by_hand(tmp_path: Path) -> None:
    first, second = metrics_run({"sync_period": 2, "outer": SgdConfig(learning_rate=0.5)}, tmp_path, 2)
    # 11 entries: losses 0.5 * 11 * 4 and 0.5 * 11 * 16
    assert first["train/loss_island_0"] == pytest.approx(22)
    assert first["train/loss_island_1"] == pytest.approx(88)
    assert first["train/loss"] == pytest.approx(55)
    assert first["diloco/loss_spread"] == pytest.approx(66)
    assert first["diloco/bytes_per_island"] == 0
    assert {n for n in first if n.startswith("diloco/")} == {"diloco/loss_spread", "diloco/bytes_per_island"}
    # Delta_0 = -2, Delta_1 = -4, Delta = -3 in each of 11 entries; Theta moves by 1.5
    assert second["train/loss"] == pytest.approx(0)
    assert second["diloco/synced_fragment"] == 0
    assert second["diloco/synced_bytes"] == second["diloco/bytes_per_island"] == 44
    assert second["diloco/outer_grad_norm"] == pytest.approx(3 * 11**0.5)
    assert second["diloco/outer_update_norm"] == pytest.approx(1.5 * 11**0.5)
    assert second["diloco/island_distance"] == pytest.approx(3 * 11**0.5)
    assert second["diloco/island_distance_max"] == pytest.approx(4 * 11**0.5)
    assert second["diloco/outer_grad_cosine"] == pytest.approx(1)


def test_metrics_of_streaming_by_hand(tmp_path: Path) -> None:
    # P=3, dh=1; f1 and f2 have 4 entries, f0 has 3. Final sync after step 4: f1 has just synced, f2 and f0 sync.
    block = {"sync_period": 3, "num_fragments": 3, "outer": SgdConfig(learning_rate=0.5)}
    steps = metrics_run(block, tmp_path, 4)
    assert [m["diloco/bytes_per_island"] for m in steps] == [16, 32, 44, 44 + 16 + 16 + 12]
    assert [m.get("diloco/synced_fragment") for m in steps] == [1, 2, 0, None]
    assert [m.get("diloco/synced_bytes") for m in steps] == [16, 16, 12, None]
    assert steps[0]["diloco/outer_grad_norm"] == pytest.approx(3 * 4**0.5)
    assert steps[2]["diloco/outer_grad_norm"] == pytest.approx(3 * 3**0.5)
    assert {steps[3][f"diloco/synced_fragment/fragment_{f}"] for f in range(3)} == {0, 1, 2}
    assert steps[3]["diloco/synced_bytes/fragment_0"] == 12


def test_metrics_of_an_overlapped_sync_come_one_step_later(tmp_path: Path) -> None:
    block = {"sync_period": 2, "overlap_steps": 1, "outer": SgdConfig(learning_rate=0.5), "final_sync": False}
    steps = metrics_run(block, tmp_path, 3)
    assert [m.get("diloco/synced_fragment") for m in steps] == [None, None, 0]
    assert steps[2]["diloco/outer_grad_norm"] == pytest.approx(3 * 11**0.5)
    assert [m["diloco/bytes_per_island"] for m in steps] == [0, 0, 44]


def test_cosine_of_opposite_islands_is_minus_one(tmp_path: Path) -> None:
    config = config_of(
        tmp_path, {"sync_period": 1, "ici_islands": 2}, mesh=mesh(), train_batch_size=2, num_train_steps=1
    )
    batch = toy_batch(np.full((2, 3), [[1.0], [-1.0]]), np.zeros((2, 2, 4)))
    [step] = run(config, optax.sgd(1.0), Toy.of(np.zeros(3), np.zeros((2, 4))), [batch])
    assert step.metrics["diloco/outer_grad_cosine"] == pytest.approx(-1)
    assert step.metrics["diloco/outer_grad_norm"] == pytest.approx(0, abs=1e-7)
    assert step.metrics["diloco/island_distance"] == pytest.approx(3**0.5)


def test_single_island_has_no_cosine(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"sync_period": 1, "ici_islands": 1}, mesh=mesh(), num_train_steps=1)
    [step] = run(config, SGD, toy(), [rows(0, 8)])
    assert "diloco/outer_grad_cosine" not in step.metrics
    assert step.metrics["diloco/loss_spread"] == 0


def test_bytes_continue_after_a_resume(tmp_path: Path) -> None:
    block = {"sync_period": 3, "num_fragments": 3, "ici_islands": 2, "final_sync": False}
    batches = [rows(step, 8) for step in range(7)]
    run(trainer_config(tmp_path, block, mesh=mesh(), num_train_steps=4), SGD, toy(), batches[:4])
    steps = run(trainer_config(tmp_path, block, mesh=mesh(), num_train_steps=7), SGD, toy(), batches)
    assert [step.metrics["diloco/bytes_per_island"] for step in steps] == [76, 88, 104]


@pytest.mark.parametrize(
    ("change", "payload"),
    [
        ({"wire": "int8", "wire_block": 2}, None),
        ({"num_fragments": 1}, 44),
        ({"num_fragments": 1, "ici_islands": 4}, 44),
        ({"num_fragments": 1, "ici_islands": 1}, 0),
    ],
    ids=["wire", "fragments", "islands", "alone"],
)
def test_other_options_put_no_other_price_on_what_was_sent(change: dict, payload: int | None, tmp_path: Path) -> None:
    block = {"sync_period": 3, "num_fragments": 3, "ici_islands": 2, "final_sync": False}
    batches = [rows(step, 8) for step in range(7)]
    before = run(trainer_config(tmp_path, block, mesh=mesh(), num_train_steps=4), SGD, toy(), batches[:4])[-1]
    assert before.metrics["diloco/bytes_per_island"] == 16 + 16 + 12 + 16
    config = trainer_config(tmp_path, {**block, **change}, mesh=mesh(), num_train_steps=7)
    sent = 60
    for step in run(config, SGD, toy(), batches):
        synced = step.metrics.get("diloco/synced_bytes", 0)
        assert synced not in (12, 16) and synced in (0, synced if payload is None else payload)
        sent += synced
        assert step.metrics["diloco/bytes_per_island"] == sent
    assert payload == 0 or sent > 60


def test_metrics_of_the_loss_function_are_means_over_islands(tmp_path: Path) -> None:
    def loss(model: Toy, batch: Any, *, key: Any = None) -> Any:
        return toy_loss(model, batch), {"first_target": hax.mean(batch["embed"])}

    config = config_of(tmp_path, {"sync_period": 9, "ici_islands": 2}, mesh=mesh(), num_train_steps=1)
    [step] = run(config, SGD, toy(), [toy_batch(np.arange(8.0)[:, None] * np.ones(3), np.zeros((8, 2, 4)))], loss)
    assert step.metrics["train/first_target"] == pytest.approx(3.5)
