"""Golden trajectories: the trainer on the traces of MaxText's own step functions."""

from pathlib import Path

import numpy as np
import optax
import pytest

from helpers.toy_model import Toy, run, toy_batch
from helpers.toy_runs import GOLDEN, SGD, config_of, difference, mesh, momentum, outer, tree_of

pytestmark = pytest.mark.usefixtures("compile_cache")


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_trajectory_matches_golden(case: dict, tmp_path: Path) -> None:
    inner = SGD
    if case["inner_optimizer"].startswith("adamw"):
        inner = optax.adamw(0.05, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    block = {name: case[name] for name in ("sync_period", "num_fragments", "overlap_steps", "mixing_alpha")}
    order = "sequential" if case["sequential_layers"] else "interleaved"
    config = config_of(
        tmp_path,
        {**block, "layer_order": order, "ici_islands": 2, "final_sync": False},
        train_batch_size=2,
        mesh=mesh(),
    )
    steps = run(config, inner, Toy.of(**GOLDEN["init"]), [toy_batch(**GOLDEN["target"])] * 14)
    assert len(steps) == len(case["trace"]) == 14
    # MaxText steps Theta at the capture, we once the fragment has crossed: V steps later, or dh if that is less.
    early = min(case["overlap_steps"], config.diloco.schedule.steps_per_sync)
    for t, (step, golden) in enumerate(zip(steps, case["trace"], strict=True)):
        assert difference(step.state.islands.params, tree_of(golden, "inner")) < 1e-6
        losses = [step.metrics[f"train/loss_island_{k}"] for k in range(2)]
        np.testing.assert_allclose(losses, golden["loss"], atol=1e-5)
        if t >= early:
            moved = case["trace"][t - early]
            assert difference(outer(step), tree_of(moved, "outer")) < 1e-6
            trace = momentum(step, sequential=case["sequential_layers"])
            assert difference(trace, tree_of(moved, "trace")) < 1e-6
