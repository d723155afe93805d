"""Inner moments of an island that starts anew, by hand."""

import jax.numpy as jnp
import numpy as np
import optax

from levanter_diloco.algorithm.moments import fresh_moments

PARAMS = {"weight": jnp.ones(2)}


def after(optimizer: optax.GradientTransformation, steps: int) -> optax.OptState:
    state = optimizer.init(PARAMS)
    for _ in range(steps):
        _, state = optimizer.update({"weight": jnp.full(2, 3.0)}, state, PARAMS)
    return state


def test_moments_are_fresh_and_the_schedule_goes_on() -> None:
    # A rate of 1, 1/2, 1/4 ... by the run's steps; Adam's moments and bias counts are an island's own.
    optimizer = optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda count: 0.5**count))
    adam, schedule = fresh_moments(optimizer.init(PARAMS), after(optimizer, 3))
    assert int(adam.count) == 0 and adam.mu["weight"].tolist() == [0, 0]
    assert int(schedule.count) == 3


def test_injected_learning_rate_is_the_present_one() -> None:
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=lambda count: 1.0 / (1 + count))
    state = fresh_moments(optimizer.init(PARAMS), after(optimizer, 3))
    assert int(state.count) == 3
    np.testing.assert_allclose(state.hyperparams["learning_rate"], 1 / 3)  # of the third update, as it was used last
    assert state.inner_state[0].mu["weight"].tolist() == [0, 0]


def test_plain_momentum_starts_at_zero() -> None:
    optimizer = optax.sgd(0.1, momentum=0.9)
    (trace, _) = fresh_moments(optimizer.init(PARAMS), after(optimizer, 2))
    assert trace.trace["weight"].tolist() == [0, 0]
