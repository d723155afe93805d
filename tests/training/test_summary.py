"""What a run says of itself: traffic, memory, periods that are not what they seem."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from levanter.checkpoint import CheckpointerConfig
from levanter.utils.mesh import MeshConfig

from helpers.toy_model import Toy, entered, recorder_of, toy_loss, trainer_config
from levanter_diloco.training.summary import Traffic, cadence_warnings, farewell


def summary_of(tmp_path: Path, diloco: dict[str, Any], axes: dict[str, int]) -> tuple[dict[str, Any], Traffic]:
    """What the tracker holds before the first step of a run on the toy (3 + 8 parameters), and its traffic."""
    config = trainer_config(tmp_path, diloco, mesh=MeshConfig(axes=axes))
    with entered(config, optax.adam(0.1), toy_loss) as trainer:
        trainer.initial_state(jax.random.PRNGKey(0), model=Toy.of(np.ones(3), np.ones((2, 4))))
        return recorder_of(trainer).summary, trainer.traffic


def warnings_of(tmp_path: Path, diloco: dict[str, Any], **options: Any) -> list[str]:
    return list(cadence_warnings(trainer_config(tmp_path, diloco, **options)))


def test_traffic_counts_each_fragment_once_a_period(tmp_path: Path) -> None:
    # fragment 0: 3 numbers; fragments 1 and 2: 2 layers of 2 numbers each; 4 bytes a number
    block = {"sync_period": 6, "num_fragments": 3, "ici_islands": 2}
    figures, traffic = summary_of(tmp_path, block, {"data": 1, "model": 4})
    assert traffic == Traffic((12, 16, 16), data_parallel=44)
    assert figures["diloco/bytes_per_period"] == 44 and figures["diloco/bytes_per_sync"] == 16
    assert figures["diloco/data_parallel_bytes_per_period"] == 6 * 44
    lines = farewell(2.0, traffic, 12 + 2 * 16, 30, "here").splitlines()
    assert lines[1] == "bytes sent per island: 44 bytes, against 1.29 KiB of data parallel, 30.0 times less"


def test_who_takes_part_is_said_where_it_is_not_everyone_alike(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    block = {"ici_islands": 2, "drop_rate": 0.25, "weights": [1.0, 3.0]}
    summary_of(tmp_path / "weighed", block, {"data": 1, "model": 4})
    assert "  drop_rate 0.25, weights [1.0, 3.0]" in caplog.messages
    caplog.clear()
    summary_of(tmp_path / "alike", {"ici_islands": 2}, {"data": 1, "model": 4})
    assert not any("guard" in message or "weights" in message for message in caplog.messages)


def test_single_island_sends_nothing(tmp_path: Path) -> None:
    block = {"sync_period": 6, "ici_islands": 1, "dcn_islands": 1}
    _, traffic = summary_of(tmp_path, block, {"data": 1, "model": 8})
    assert traffic.of_sync(0) == 0
    lines = farewell(None, traffic, 0, 30, "here").splitlines()
    assert lines == [
        "final outer validation loss: none evaluated",
        "bytes sent per island: 0 bytes, against 1.29 KiB of data parallel",
        "checkpoint: here",
    ]


def test_memory_counts_the_islands_that_share_a_device(tmp_path: Path) -> None:
    # Theta, momentum and a captured copy for each of two islands: 44 bytes each; the count of the outer optimizer 4
    # and, of the run itself: a key, what is settled, how many train, the outer steps of one fragment, what was sent in
    # two words, eight facts of its layout; an island's own, such as its status, does not count: it trains by itself
    block = {"sync_period": 6, "overlap_steps": 1}
    apart, _ = summary_of(tmp_path, {**block, "ici_islands": 2}, {"data": 1, "model": 4})
    shared, _ = summary_of(tmp_path, {**block, "islands_per_slot": 2, "dcn_islands": 1}, {"data": 1, "model": 8})
    outer = apart["diloco/memory_added_per_device"]
    assert outer == (3 * 44 + 4) + (8 + 4 + 4 + 4 + 8 + 8 * 4)
    # one more captured copy, and one more island: parameters, two Adam moments, Adam's count, a key, whether it has
    # failed, its weight and its status
    assert shared["diloco/memory_added_per_device"] == outer + 44 + (3 * 44 + 4 + 8 + 4 + 4 + 1)


def test_period_that_fragments_do_not_keep_names_the_one_in_effect(tmp_path: Path) -> None:
    [warning] = warnings_of(tmp_path, {"sync_period": 100, "num_fragments": 37}, num_train_steps=999)
    assert "trainer.diloco.sync_period (100) takes effect as 111" in warning and "111 is the nearest" in warning


def test_period_longer_than_the_run_is_said(tmp_path: Path) -> None:
    [warning] = warnings_of(tmp_path, {"sync_period": 15}, num_train_steps=14)
    assert "trainer.diloco.sync_period takes effect as 15, longer than the run of 14 steps" in warning


@pytest.mark.parametrize(("steps_per_eval", "said"), [(7, True), (8, False), (4, False), (1000, False)])
def test_evaluation_that_never_falls_on_a_sync_is_said(steps_per_eval: int, said: bool, tmp_path: Path) -> None:
    # syncs at 4, 8, 12, ... of 20 steps; 7 first meets them at 28
    found = warnings_of(tmp_path, {"sync_period": 4}, num_train_steps=20, steps_per_eval=steps_per_eval)
    assert ["trainer.steps_per_eval (7) never falls on a sync" in warning for warning in found] == [True] * said


@pytest.mark.parametrize(("every", "said"), [(4, False), (8, False), (3, False), (6, True)])
def test_checkpoint_that_never_falls_on_a_sync_is_said(every: int, said: bool, tmp_path: Path) -> None:
    # The host saves after step every*n + 1 of 12: one step after a sync for multiples of 4, at 4 for 3, at 7 for 6.
    checkpointer = CheckpointerConfig(base_path=str(tmp_path), keep=[{"every": every}])
    found = warnings_of(tmp_path, {"sync_period": 4}, num_train_steps=12, checkpointer=checkpointer)
    assert ["trainer.checkpointer.keep.every (6) never falls on a sync" in warning for warning in found] == [
        True
    ] * said
