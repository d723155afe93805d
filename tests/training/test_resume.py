"""Killed at any step and resumed, a run ends at the same bits; other checkpoints start one."""

from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import levanter.tracker
import numpy as np
import optax
import pytest
from levanter.checkpoint import CheckpointerConfig, load_checkpoint, save_checkpoint
from levanter.optim.config import AdamConfig
from levanter.trainer import Trainer
from levanter.utils.mesh import MeshConfig

from helpers.host_runs import stock_config
from helpers.toy_model import Embed, Recorder, Toy, entered, numbers, run, toy_batch, toy_loss, trainer_config

pytestmark = pytest.mark.usefixtures("compile_cache")

STEPS = 14
MESH = MeshConfig(axes={"data": 1, "model": -1}, param_mapping={"entry": "data"})
SGD = optax.sgd(0.1)
STREAMING = {"sync_period": 6, "num_fragments": 3}  # captures at 2 4 6 ...: f1 f2 f0
CASES = {
    "vanilla": ({"sync_period": 4}, SGD),
    "streaming": (STREAMING, SGD),
    "streaming_V1": ({**STREAMING, "overlap_steps": 1}, SGD),
    "streaming_V2_alpha": ({**STREAMING, "overlap_steps": 2, "mixing_alpha": 0.5}, SGD),
    "streaming_V1_adam": (
        {**STREAMING, "overlap_steps": 1},
        AdamConfig(learning_rate=1e-2, warmup=4).build(STEPS),
    ),
    "streaming_V5_three_in_flight": ({**STREAMING, "overlap_steps": 5, "mixing_alpha": 0.5}, SGD),
    "balanced_V2_int4_feedback": (
        {
            **{"sync_period": 8, "num_fragments": 2, "partition": "balanced", "overlap_steps": 2, "mixing_alpha": 0.5},
            **{"wire": "int4", "wire_block": 2, "wire_rounding": "stochastic", "error_feedback": True},
        },
        SGD,
    ),
}


def toy(seed: int = 0) -> Toy:
    rng = np.random.default_rng(seed)
    return Toy.of(rng.normal(size=3), rng.normal(size=(2, 4)))


def rows(seed: int) -> dict:
    rng = np.random.default_rng(1000 + seed)
    return toy_batch(rng.normal(size=(8, 3)), rng.normal(size=(8, 2, 4)))


BATCHES = [rows(step) for step in range(STEPS)]


def noisy_loss(model: Toy, batch: Any, *, key: Any = None) -> Any:
    """Depends on the island's random stream."""
    return toy_loss(model, batch) + 0.1 * hax.sum(model.embed * hax.random.normal(key, Embed))


def options(path: Path, block: dict, **others: Any) -> Any:
    return trainer_config(path, {"ici_islands": 2, **block}, mesh=MESH, **{"num_train_steps": STEPS, **others})


def assert_bit_equal(left: Any, right: Any) -> None:
    pairs = zip(jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True)
    for (path, a), b in pairs:
        assert a.dtype == b.dtype, jax.tree_util.keystr(path)
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_resume_at_every_step_equals_the_uninterrupted_run(name: str, tmp_path: Path) -> None:
    block, inner = CASES[name]
    after: dict[int, Any] = {}
    with entered(options(tmp_path / "straight", block), inner, noisy_loss) as trainer:

        def keep(info: Any) -> None:
            if info.next_step not in after:
                save_checkpoint(info.state.saveable_state, info.step, tmp_path / f"{info.next_step}")
                after[info.next_step] = numbers(info.state)

        trainer.add_hook(keep, every=1)
        state = trainer.initial_state(jax.random.PRNGKey(0), model=toy())
        whole = numbers(trainer.train(state, BATCHES).state)
        programs = trainer._programs
    assert whole.outer_steps.min() >= 2
    for step in range(1, STEPS):
        config = options(tmp_path / f"from-{step}", block, load_checkpoint_path=str(tmp_path / f"{step}"))
        with entered(config, inner, noisy_loss) as trainer:
            # Nothing of the new run may matter: neither its model nor its key.
            state = trainer.initial_state(jax.random.PRNGKey(99), model=toy(99))
            assert_bit_equal(numbers(state), after[step])
            if step not in (5, 9):  # these compile anew; the others only save the time
                trainer._programs = programs
            resumed = numbers(trainer.train(state, BATCHES[step:]).state)
        assert_bit_equal(resumed, whole)


@pytest.mark.slow
def test_resume_from_the_hosts_own_checkpoint(tmp_path: Path) -> None:
    # The data ends after 5 steps, as in a killed run; the host saved after steps 2 to 5.
    block = {**STREAMING, "overlap_steps": 2, "mixing_alpha": 0.5, "final_sync": False}
    every = CheckpointerConfig(base_path=str(tmp_path / "checkpoints"), save_interval=None, keep=[{"every": 1}])
    whole = run(options(tmp_path / "whole", block), SGD, toy(), BATCHES, noisy_loss)
    run(options(tmp_path, block, checkpointer=every), SGD, toy(), BATCHES[:5], noisy_loss)
    assert sorted(path.name for path in (tmp_path / "checkpoints/toy").iterdir()) == [f"step-{n}" for n in range(1, 5)]
    resumed = run(options(tmp_path, block, checkpointer=every), SGD, toy(99), BATCHES, noisy_loss)
    assert len(resumed) == STEPS - 5
    for ours, theirs in zip(resumed, whole[5:], strict=True):
        assert_bit_equal(ours.state, theirs.state)
        for name in ("train/loss", "diloco/bytes_per_island", "diloco/loss_spread"):
            assert ours.metrics[name] == theirs.metrics[name]


@pytest.mark.slow
def test_resume_with_other_options(tmp_path: Path) -> None:
    saved = {**STREAMING, "final_sync": False}
    last = run(options(tmp_path, saved, num_train_steps=3), SGD, toy(), BATCHES[:3])[-1]
    for change in ({}, {"sync_period": 9}, {"wire": "int4"}, {"outer_memory": "sharded"}):
        with entered(options(tmp_path, {**saved, **change}), SGD, toy_loss) as trainer:
            state = numbers(trainer.initial_state(jax.random.PRNGKey(0), model=toy()))
        for field in ("step", "model", "opt_state", "outer_steps"):
            assert_bit_equal(getattr(state, field), getattr(last.state, field))
        for field in ("params", "opt_state", "key", "failed"):
            assert_bit_equal(getattr(state.islands, field), getattr(last.state.islands, field))


def stock_checkpoint(path: Path, inner: Any, steps: int) -> Any:
    """Saves the full state of a stock run and returns it."""
    config = stock_config(path / "stock", train_batch_size=8)
    config._validate_and_set_defaults()
    with (
        levanter.tracker.current_tracker(Recorder()),
        # pyrefly: ignore[bad-argument-type]  the host's protocol of a loss names no arguments
        Trainer(config, inner, toy_loss, add_default_hooks=False) as trainer,
    ):
        state = trainer.initial_state(jax.random.PRNGKey(3), model=toy())
        for batch in BATCHES[:steps]:
            state = trainer.train_step(state, batch).state
        save_checkpoint(state.saveable_state, steps - 1, path / f"stock-{steps}")
        return numbers(state)


@pytest.mark.slow
def test_stock_checkpoint_starts_islands(tmp_path: Path) -> None:
    inner = AdamConfig(learning_rate=1e-2, warmup=4).build(STEPS)
    stock = stock_checkpoint(tmp_path, inner, 3)
    block = {**STREAMING, "ici_islands": 4}
    config = options(tmp_path, block, load_checkpoint_path=str(tmp_path / "stock-3"))
    with entered(config, inner, toy_loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=toy(99))
        first = numbers(state)
        last = numbers(trainer.train(state, BATCHES[3:]).state)
    assert int(first.step) == 3
    assert_bit_equal(first.model, stock.model)
    for k in range(4):
        own = jax.tree.map(lambda x, k=k: x[k], first.islands)
        assert_bit_equal(jax.tree.leaves(own.params), jax.tree.leaves(stock.model))
        assert_bit_equal(jax.tree.leaves(own.opt_state), jax.tree.leaves(stock.opt_state))
    assert max(np.abs(x).max() for x in jax.tree.leaves(stock.opt_state)) > 0
    assert all(not x.any() for x in jax.tree.leaves(first.opt_state))
    assert first.outer_steps.tolist() == [0, 0, 0]
    assert len({tuple(key.tolist()) for key in first.islands.key}) == 4
    assert int(last.step) == STEPS


def test_stock_checkpoint_leaves_the_syncs_to_steps_of_this_run(tmp_path: Path) -> None:
    # V=2: a capture at step 2 of the stock run never was, so nothing crosses or merges in steps 3 and 4; that of
    # step 4 has crossed after step 6.
    stock_checkpoint(tmp_path, SGD, 2)
    block = {**STREAMING, "overlap_steps": 2, "final_sync": False}
    config = options(tmp_path, block, load_checkpoint_path=str(tmp_path / "stock-2"), num_train_steps=6)
    steps = run(config, SGD, toy(99), BATCHES[:6])
    assert [step.state.outer_steps.tolist() for step in steps] == [[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1]]


def test_model_of_the_checkpoint_starts_a_stock_run(tmp_path: Path) -> None:
    block = {**STREAMING, "mixing_alpha": 0.5, "final_sync": False}
    last = run(options(tmp_path, block, num_train_steps=4), SGD, toy(), BATCHES[:4])[-1]
    path = str(tmp_path / "checkpoints" / "toy" / "step-3")
    config = stock_config(tmp_path, train_batch_size=8)
    config._validate_and_set_defaults()
    with (
        levanter.tracker.current_tracker(Recorder()),
        # pyrefly: ignore[bad-argument-type]  the host's protocol of a loss names no arguments
        Trainer(config, SGD, toy_loss, add_default_hooks=False) as trainer,
    ):
        shapes = eqx.filter_eval_shape(lambda: toy(99))
        where = {"axis_mapping": trainer.parameter_axis_mapping, "mesh": trainer.device_mesh}
        model = load_checkpoint(shapes, path, subpath="model", **where)
        assert_bit_equal(numbers(model), last.state.model)
        state = trainer.initial_state(jax.random.PRNGKey(0), model=model)
        info = trainer.train_step(state, BATCHES[4])
        assert info.next_step == 1
        assert np.isfinite(info.loss)
