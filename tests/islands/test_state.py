"""The training state as it starts."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis
from levanter.trainer_state import TrainerState

from levanter_diloco.islands.layout import Layout
from levanter_diloco.islands.state import DiLoCoState
from levanter_diloco.options.config import DiLoCoConfig

Embed = Axis("embed", 3)
OUTER = optax.sgd(0.7, momentum=0.9)


def started(num_islands: int, dtype: str = "float32", **block: object) -> DiLoCoState:
    model = {"weight": hax.arange(Embed, dtype=jnp.dtype(dtype)), "frozen": hax.ones(Embed)}
    trainable = {"weight": True, "frozen": False}
    key = jax.random.PRNGKey(3)
    host = TrainerState.init(optax.adam(0.1), model, key=key, is_trainable=trainable)
    return DiLoCoState.of(host, Layout(DiLoCoConfig(**block), num_islands, {}), OUTER)  # pyrefly: ignore[bad-argument-type]  options


def test_theta_and_momentum_are_f32_and_islands_keep_the_dtype() -> None:
    state = started(2, "bfloat16")
    assert state.theta["weight"].dtype == jnp.float32
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.opt_state["rest"][0]))
    assert state.islands.params["weight"].dtype == jnp.bfloat16
    assert state.theta_of_islands["weight"].dtype == jnp.bfloat16


def test_frozen_leaves_exist_once() -> None:
    state = started(2)
    assert state.theta["frozen"] is None and state.islands.params["frozen"] is None
    assert state.model["frozen"].axes == (Embed,)


def test_islands_are_copies_with_random_streams_of_their_own() -> None:
    state = started(3)
    assert state.islands.params["weight"].array.tolist() == [[0, 1, 2]] * 3
    assert len({key.tobytes() for key in np.asarray(jax.random.key_data(state.islands.key))}) == 3
    alone = started(1)
    np.testing.assert_array_equal(alone.islands.key[0], alone.training_key)  # it draws what the host would


@pytest.mark.parametrize(
    ("block", "captured", "crossed", "residual"),
    [
        ({}, False, False, False),
        ({"overlap_steps": 1}, True, False, False),
        ({"overlap_steps": 2}, True, True, False),
        ({"wire": "int8", "error_feedback": True}, False, False, True),
    ],
)
def test_state_has_room_for_what_the_options_need(block: dict, captured: bool, crossed: bool, residual: bool) -> None:
    state = started(2, **block)
    found = [x is not None for x in (state.captured, state.crossed, state.residual)]
    assert found == [captured, crossed, residual]


def test_run_restarts_at_another_model() -> None:
    other = {"weight": hax.full(Embed, 0.5), "frozen": hax.zeros(Embed)}
    state = started(2, "bfloat16").restarted_at(other)
    assert state.theta["weight"].dtype == jnp.float32 and state.theta["weight"].array.tolist() == [0.5] * 3
    assert state.islands.params["weight"].dtype == jnp.bfloat16
    assert state.islands.params["weight"].array.tolist() == [[0.5] * 3] * 2
    assert state.model["frozen"].array.tolist() == [1, 1, 1]  # of the run itself
