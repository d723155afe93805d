"""Precision: Theta and momentum are f32 whatever the parameters are."""

from pathlib import Path

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from levanter.optim.config import AdamConfig
from levanter.utils.mesh import MeshConfig

from helpers.host_runs import llama, text_batch, text_loss
from helpers.toy_model import Toy, run, toy_batch
from helpers.toy_runs import config_of, mesh, momentum, outer
from levanter_diloco.options.outer import NesterovConfig

pytestmark = pytest.mark.usefixtures("compile_cache")


def test_outer_state_stays_f32_and_moves_by_less_than_bf16_holds(tmp_path: Path) -> None:
    # Islands in bf16 go from 1 to 1 - 2^-7 in each inner step; the outer rate 2^-6 makes that -2^-13 of Theta,
    # 1.2e-4 relative, where bf16 has steps of 2^-8 below 1. Theta rounds to 1 in bf16, so each step repeats.
    config = config_of(
        tmp_path,
        {"sync_period": 1, "ici_islands": 2, "outer": NesterovConfig(learning_rate=2.0**-6, momentum=0.0)},
        mesh=mesh(),
        mp=jmp.get_policy("p=bf16,c=f32"),
        num_train_steps=4,
    )
    batch = toy_batch(np.zeros((8, 3)), np.zeros((8, 2, 4)))
    steps = run(config, optax.sgd(2.0**-7), Toy.of(np.ones(3), np.ones((2, 4))), [batch] * 4)
    theta = np.float32(1)
    for step in steps:
        theta -= np.float32(2.0**-6) * (theta - np.float32(1 - 2.0**-7))
        for leaf in jax.tree.leaves(outer(step)):
            assert leaf.dtype == np.float32
            np.testing.assert_array_equal(leaf, np.full_like(leaf, theta))
        assert {leaf.dtype for leaf in jax.tree.leaves(step.state.islands.params)} == {np.dtype(jnp.bfloat16)}
        floats = [x for x in jax.tree.leaves(step.state.opt_state) if jnp.issubdtype(x.dtype, jnp.inexact)]
        assert {x.dtype for x in floats} <= {np.dtype(np.float32)}


def test_outer_momentum_is_f32_with_bf16_parameters(tmp_path: Path) -> None:
    # Islands go from 1 to 1 - 2^-7: m1 = 2^-7, Theta = 1 - 2^-8 * 1.5 * 2^-7, which is 1 in bf16, so that they do it
    # again: m2 = 0.5 * 2^-7 + Theta - (1 - 2^-7)
    config = config_of(
        tmp_path,
        {"sync_period": 1, "ici_islands": 2, "outer": NesterovConfig(learning_rate=2.0**-8, momentum=0.5)},
        mesh=mesh(),
        mp=jmp.get_policy("p=bf16,c=bf16"),
        num_train_steps=2,
    )
    batch = toy_batch(np.zeros((8, 3)), np.zeros((8, 2, 4)))
    steps = run(config, optax.sgd(2.0**-7), Toy.of(np.ones(3), np.ones((2, 4))), [batch] * 2)
    first, second = (momentum(step, sequential=False) for step in steps)
    assert first["embed"].dtype == second["layers"].dtype == np.float32
    np.testing.assert_array_equal(first["layers"], np.full((2, 4), 2.0**-7))
    np.testing.assert_array_equal(second["embed"], np.full(3, 1.5 * 2.0**-7 * (1 - 2.0**-8)))


@pytest.mark.slow
def test_llama_with_bf16_parameters_moves_theta_in_f32(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        {"sync_period": 1, "ici_islands": 2, "outer": NesterovConfig(learning_rate=1e-4)},
        mesh=MeshConfig(axes={"data": 4, "model": 1}),
        mp=jmp.get_policy("p=bf16,c=bf16"),
        num_train_steps=2,
    )
    steps = run(config, AdamConfig(learning_rate=1e-2, warmup=0).build(14), llama(), [text_batch(0, 8)] * 2, text_loss)
    leaves = jax.tree_util.tree_leaves_with_path
    for (path, first), (_, second) in zip(leaves(outer(steps[0])), leaves(outer(steps[1])), strict=True):
        assert first.dtype == second.dtype == np.float32
        assert (first != second).any(), jax.tree_util.keystr(path)
        assert np.max(np.abs(first - second)) < 1e-4
    assert {leaf.dtype for leaf in jax.tree.leaves(steps[1].state.islands.params)} == {np.dtype(jnp.bfloat16)}
