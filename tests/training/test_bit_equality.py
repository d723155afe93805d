"""Bit equality of the outer state on all devices, and of islands after a sync."""

from pathlib import Path

import jax
import numpy as np
import pytest

from helpers.toy_model import numbers
from helpers.toy_runs import assert_bit_equal, config_of, difference, mesh, rows, toy, watched

pytestmark = pytest.mark.usefixtures("compile_cache")


@pytest.mark.parametrize(
    ("overlap", "alpha", "sizes"), [(0, 0.0, {"data": 2}), (1, 0.5, {}), (1, 0.5, {"data": 2}), (2, 0.0, {})]
)
def test_outer_state_is_bit_equal_on_all_devices(overlap: int, alpha: float, sizes: dict, tmp_path: Path) -> None:
    block = {"sync_period": 3, "num_fragments": 3, "overlap_steps": overlap, "mixing_alpha": alpha, "ici_islands": 2}
    config = config_of(tmp_path, block, mesh=mesh(**sizes), num_train_steps=10)
    states = watched(config, [rows(step, 8) for step in range(10)])
    assert [names for _, names in states] == [[]] * 11
    assert difference(states[-1][0].model, numbers(toy())) > 1e-3


def test_islands_are_bit_equal_after_a_sync_and_differ_before(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"sync_period": 3, "ici_islands": 4}, mesh=mesh(data=2), num_train_steps=9)
    for t, (state, _) in enumerate(watched(config, [rows(step, 8) for step in range(9)])[:-1], start=1):
        params = [jax.tree.map(lambda x, k=k: x[k], state.islands.params) for k in range(4)]
        if t % 3 == 0:
            for k in range(4):
                assert_bit_equal(params[k], state.model)
        else:
            assert min(difference(params[0], params[k]) for k in range(1, 4)) > 1e-3


def test_islands_share_the_synced_fragment_alone(tmp_path: Path) -> None:
    # P=3, dh=1: f1 = layers 0 2, f2 = layers 1 3, f0 = embed
    config = config_of(
        tmp_path,
        {"sync_period": 3, "num_fragments": 3, "ici_islands": 2, "final_sync": False},
        mesh=mesh(),
        num_train_steps=6,
    )
    for t, (state, _) in enumerate(watched(config, [rows(step, 8) for step in range(6)])[:-1], start=1):
        params, theta = state.islands.params, state.model
        layers = params.layers.stacked.weight.array
        fragment = t % 3
        equal = [bool((layers[0, :, i] == layers[1, :, i]).all()) for i in range(4)]
        assert equal == [fragment == 1 + i % 2 for i in range(4)]
        assert (params.embed.array[0] == params.embed.array[1]).all() == (fragment == 0)
        if fragment == 0:
            np.testing.assert_array_equal(params.embed.array[1], theta.embed.array)
        else:
            mine = slice(fragment - 1, None, 2)
            np.testing.assert_array_equal(layers[1][:, mine], theta.layers.stacked.weight.array[:, mine])
