"""The trainer's schedule, with accumulation, overlap and learning rates."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from levanter.optim.config import AdamConfig

from helpers.host_runs import joined, stock_config, stock_runs
from helpers.toy_model import entered, numbers, run, toy_loss, trainer_config
from helpers.toy_runs import SGD, assert_bit_equal, config_of, difference, island, island_rows, mesh, outer, rows, toy
from levanter_diloco.islands.programs import Programs
from levanter_diloco.islands.sync import SyncReport
from levanter_diloco.training import metrics
from levanter_diloco.training import trainer as trainer_module

pytestmark = pytest.mark.usefixtures("compile_cache")


@pytest.mark.slow
def test_gradient_accumulation_leaves_the_schedule_unchanged(tmp_path: Path) -> None:
    def synced(per_device: int) -> tuple[list, Any]:
        block = {"sync_period": 4, "num_fragments": 3, "ici_islands": 2}
        config = config_of(tmp_path, block, mesh=mesh(), num_train_steps=7, per_device_parallelism=per_device)
        steps = run(config, SGD, toy(), [rows(step, 8) for step in range(7)])
        return [step.metrics.get("diloco/synced_fragment") for step in steps], steps[-1].state

    (plain, state), (accumulated, same) = synced(-1), synced(1)
    assert plain == accumulated == [1, 2, 0, 1, 2, 0, None]  # the last step's final sync is of several fragments
    assert difference(state, same) < 1e-6


def test_a_step_is_dispatched_before_a_number_of_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # P=2, dh=1, V=1: each step from 2 on reduces one fragment, merges it and captures the next; the last one syncs.
    calls: list[str] = []

    def noted(name: str, fn: Any) -> Any:
        return lambda *args, **kwargs: (calls.append(name), fn(*args, **kwargs))[1]

    for name in ("step", "apply", "reduce_and_step", "mark_settled"):
        monkeypatch.setattr(Programs, name, noted("dispatch", getattr(Programs, name)))
    monkeypatch.setattr(trainer_module, "local_values", noted("read", trainer_module.local_values))
    monkeypatch.setattr(metrics, "local_values", noted("read", metrics.local_values))
    monkeypatch.setattr(SyncReport, "outer_grad_norm", property(noted("read", lambda report: report[1])))
    block = {"sync_period": 2, "num_fragments": 2, "partition": "balanced", "overlap_steps": 1, "ici_islands": 2}
    config = config_of(tmp_path, block, mesh=mesh(), num_train_steps=4)
    with entered(config, SGD, toy_loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=toy())
        for step in range(4):
            calls.clear()
            state = trainer.train_step(state, rows(step, 8)).state
            dispatched = calls.index("read")
            assert dispatched == [2, 3, 3, 6][step]
            assert "dispatch" not in calls[dispatched:]


def test_building_a_trainer_moves_no_file(tmp_path: Path) -> None:
    killed = tmp_path / "checkpoints" / "toy" / "step-3"
    killed.mkdir(parents=True)
    (killed / "manifest.json").write_text("{}")  # without metadata.json: its save did not end
    with entered(trainer_config(tmp_path, {"ici_islands": 2}, mesh=mesh()), SGD, toy_loss) as trainer:
        assert [path.name for path in killed.parent.iterdir()] == ["step-3"]
        assert [path.name for path in killed.iterdir()] == ["manifest.json"]
        trainer.initial_state(jax.random.PRNGKey(0), model=toy())


def test_fragment_is_never_applied_before_its_first_capture(tmp_path: Path) -> None:
    # V=2, P=3, dh=3: captures at 3 6 9, merges at 5 8 11. Until then islands are stock runs.
    batches = island_rows(5, 2, 4)
    stock = stock_runs(
        stock_config(tmp_path, train_batch_size=4), SGD, toy(), [[step[k] for step in batches] for k in range(2)]
    )
    block = {"sync_period": 9, "num_fragments": 3, "overlap_steps": 2, "ici_islands": 2, "final_sync": False}
    config = config_of(tmp_path, block, mesh=mesh(), num_train_steps=5)
    ours = run(config, SGD, toy(), [joined(step) for step in batches])
    for t in range(4):
        for k in range(2):
            assert difference(island(ours[t], k).params, stock[k][t].state.model) < 1e-6
    assert_bit_equal(outer(ours[2]), numbers(toy()))
    layers = [island(ours[4], k).params.layers.stacked.weight.array for k in range(2)]
    np.testing.assert_array_equal(layers[0][:, ::2], layers[1][:, ::2])
    assert (layers[0][:, 1::2] != layers[1][:, 1::2]).all()


@pytest.mark.slow
def test_learning_rate_is_the_stock_function_of_the_step(tmp_path: Path) -> None:
    inner = AdamConfig(learning_rate=1e-2, warmup=4, lr_schedule="cosine", min_lr_ratio=0.1).build(14)
    batches = [rows(step, 8) for step in range(14)]
    [stock] = stock_runs(stock_config(tmp_path, train_batch_size=8), inner, toy(), [batches])
    block = {"sync_period": 4, "num_fragments": 3, "overlap_steps": 1, "ici_islands": 2}
    ours = run(config_of(tmp_path, block, mesh=mesh()), inner, toy(), batches)
    rates = [float(step.state.opt_state.hyperparams["learning_rate"]) for step in stock]
    assert [step.metrics["optim/learning_rate"] for step in ours] == rates
    assert len(set(rates)) > 10
    for step, rate in zip(ours, rates, strict=True):
        np.testing.assert_array_equal(
            step.state.islands.opt_state.hyperparams["learning_rate"], np.array([rate] * 2, np.float32)
        )
