"""The guard and the attendance of islands, by hand."""

from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from levanter_diloco.islands.guard import Attendance, Guard, void
from levanter_diloco.islands.state import Islands, Status

Island, Embed = Axis("diloco", 4), Axis("embed", 2)
COUNTED, LEFT_OUT, RESTARTED = (int(status) for status in Status)


def islands(**changes: Any) -> Islands:
    arrays: dict[str, Any] = {
        "params": None,
        "opt_state": None,
        "key": jax.random.split(jax.random.key(0), 4),
        "failed": jnp.zeros(4, jnp.int32),
        "weights": jnp.zeros((4, 3), jnp.float32),
        "status": jnp.zeros((4, 3), jnp.int8),
    }
    return Islands(**(arrays | changes))


def gradients(*norms: float) -> dict[str, hax.NamedArray]:
    """Outer gradients of the given norms."""
    return {"weight": hax.named(jnp.array([[0.6 * norm, 0.8 * norm] for norm in norms]), (Island, Embed))}


def test_message_says_weight_and_status_in_one_number() -> None:
    status = jnp.array([COUNTED, LEFT_OUT, RESTARTED, COUNTED], jnp.int8)
    attendance = Attendance(jnp.array([0.5, 0.0, 0.0, 0.0]), status)
    assert attendance.message.tolist() == [0.5, -1, -2, 0]
    read = Attendance.of_message(attendance.message)
    assert read.weights.tolist() == attendance.weights.tolist() and read.status.tolist() == attendance.status.tolist()


def test_capture_leaves_out_what_is_not_finite_of_those_that_train() -> None:
    # Island 0 had a NaN loss, 1 has an infinite gradient, 2 is sound, 3 does not train.
    own = islands(failed=jnp.array([1, 0, 0, 1]))
    found = Guard(True, None).at_capture(own, gradients(1, np.inf, 1, np.nan), jnp.array([1.0, 1, 1, 0]), jnp.int32(3))
    assert found.weights.tolist() == [0, 0, 1, 0]
    assert found.status.tolist() == [LEFT_OUT, LEFT_OUT, COUNTED, COUNTED]
    off = Guard(False, None).at_capture(own, gradients(1, np.inf, 1, np.nan), jnp.array([1.0, 1, 1, 0]), jnp.int32(3))
    assert off.weights.tolist() == [1, 1, 1, 0] and off.status.tolist() == [COUNTED] * 4


@pytest.mark.parametrize(("factor", "weights"), [(None, [1, 1, 1, 0]), (10.0, [1, 1, 1, 0]), (2.5, [1, 1, 0, 0])])
def test_reduce_leaves_out_what_is_too_long_for_the_median_of_those_in_it(factor: float | None, weights: list) -> None:
    # The median of 1, 2 and 6 is 2; the absent island's 100 does not shift it.
    attendance = Attendance(jnp.array([1.0, 1, 1, 0]), jnp.zeros(4, jnp.int8))
    found = Guard(True, factor).at_reduce(attendance, gradients(1, 2, 6, 100))
    assert found.weights.tolist() == weights


def test_losses_are_remembered_until_the_island_starts_anew() -> None:
    guard = Guard(True, None)
    once = guard.note_losses(islands(), jnp.array([1.0, np.nan, np.inf, 2.0]))
    assert guard.note_losses(once, jnp.ones(4)).failed.tolist() == [0, 1, 1, 0]
    assert Guard(False, None).note_losses(islands(), jnp.full(4, np.nan)).failed.tolist() == [0] * 4


def test_what_was_captured_of_a_broken_island_counts_no_more() -> None:
    # Island 1 was left out of fragment 0 while its fragment 2 was under way; island 2 restarts for another reason.
    weights = jnp.array([[1.0, 1, 1], [0, 0, 1], [1, 1, 1], [1, 1, 1]])
    status = jnp.zeros((4, 3), jnp.int8).at[1, 0].set(LEFT_OUT)
    found = void(islands(weights=weights, status=status), jnp.array([False, True, True, False]))
    assert found.weights.tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 1], [1, 1, 1]]
    assert found.status.tolist() == [[0, 0, 0], [RESTARTED, 0, RESTARTED], [0, 0, 0], [0, 0, 0]]
