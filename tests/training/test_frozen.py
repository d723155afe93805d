"""Frozen leaves: once, unchanged, and on no wire."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from helpers.toy_model import Toy, numbers, run
from helpers.toy_runs import SGD, config_of, difference, mesh, outer, rows, toy

pytestmark = pytest.mark.usefixtures("compile_cache")


def test_frozen_leaves_are_unchanged_and_exist_once(tmp_path: Path) -> None:
    mask: Any = {"embed": False, "layers": True}  # Any: a mask has the structure of a model
    frozen = Toy(**mask)
    config = config_of(tmp_path, {"sync_period": 2, "ici_islands": 2}, mesh=mesh(), num_train_steps=4)
    steps = run(config, SGD, toy(), [rows(step, 8) for step in range(4)], is_trainable=frozen)
    for step in steps:
        np.testing.assert_array_equal(outer(step).embed.array, toy().embed.array)
        assert jax.tree.leaves(step.state.islands.params.embed) == []
        assert step.state.islands.params.layers.stacked.weight.array.shape == (2, 2, 4)
        assert sum(x.size for x in jax.tree.leaves(step.state.opt_state)) <= 8 + 1  # a momentum and a count
    assert difference(outer(steps[-1]).layers, numbers(toy()).layers) > 1e-3
    # 8 trainable numbers of 4 bytes cross in each of the two syncs
    assert [step.metrics["diloco/bytes_per_island"] for step in steps] == [0, 32, 32, 64]
    assert steps[1].metrics["diloco/synced_bytes"] == 32


@pytest.mark.parametrize("overlap", [0, 1])
def test_frozen_layers_do_not_move(overlap: int, tmp_path: Path) -> None:
    layers = toy().layers
    mask: Any = {"embed": True, "layers": replace(layers, stacked=False)}
    frozen = Toy(**mask)
    block = {"sync_period": 2, "overlap_steps": overlap, "ici_islands": 2}
    config = config_of(tmp_path, block, mesh=mesh(), num_train_steps=4)
    steps = run(config, SGD, toy(), [rows(step, 8) for step in range(4)], is_trainable=frozen)
    np.testing.assert_array_equal(outer(steps[-1]).layers.stacked.weight.array, layers.stacked.weight.array)
    assert steps[-1].metrics["diloco/bytes_per_island"] % 12 == 0
