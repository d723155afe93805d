"""Random streams of the islands."""

from pathlib import Path
from typing import Any

import haliax as hax
import jax
import numpy as np
import pytest

from helpers.host_runs import stock_config, stock_runs
from helpers.toy_model import Embed, Toy, run, toy_loss
from helpers.toy_runs import SGD, config_of, difference, island, mesh, rows, toy

pytestmark = pytest.mark.usefixtures("compile_cache")


def noise_loss(model: Toy, batch: Any, *, key: Any = None) -> Any:
    """Its gradient for `embed` is noise drawn from `key`."""
    return toy_loss(model, batch) * 0 + hax.sum(model.embed * hax.random.normal(key, Embed))


def test_random_streams_differ_between_islands(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        {"sync_period": 9, "ici_islands": 2, "islands_per_slot": 2, "final_sync": False},
        mesh=mesh(),
        num_train_steps=3,
    )
    steps = run(config, SGD, toy(), [rows(0, 8)] * 3, noise_loss)
    seen = [tuple(island(step, k).params.embed.array.tolist()) for step in steps for k in range(4)]
    assert len(set(seen)) == 12
    assert len({tuple(island(step, k).key.tolist()) for step in steps for k in range(4)}) == 12


def test_random_streams_equal_stock_runs_with_the_islands_keys(tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.PRNGKey(0), 2)
    batches = [rows(0, 4)] * 3
    stock = stock_runs(stock_config(tmp_path, train_batch_size=4), SGD, toy(), [batches] * 2, noise_loss, keys=keys)
    block = {"sync_period": 9, "ici_islands": 2, "final_sync": False}
    config = config_of(tmp_path, block, mesh=mesh(), num_train_steps=3)
    for t, step in enumerate(run(config, SGD, toy(), [rows(0, 8)] * 3, noise_loss)):
        for k in range(2):
            assert difference(island(step, k).params, stock[k][t].state.model) < 1e-6


def test_single_island_keeps_the_hosts_random_stream(tmp_path: Path) -> None:
    batches = [rows(0, 8)] * 3
    [stock] = stock_runs(stock_config(tmp_path, train_batch_size=8), SGD, toy(), [batches], noise_loss)
    block = {"sync_period": 9, "ici_islands": 1, "final_sync": False}
    ours = run(config_of(tmp_path, block, mesh=mesh(), num_train_steps=3), SGD, toy(), batches, noise_loss)
    for step, theirs in zip(ours, stock, strict=True):
        np.testing.assert_array_equal(island(step, 0).key, theirs.state.training_key)
        assert difference(island(step, 0).params, theirs.state.model) < 1e-6
