"""Weights of the islands in a sync, by hand."""

from typing import Any

import numpy as np
import pytest

from levanter_diloco.algorithm.participation import Participation
from levanter_diloco.algorithm.schedule import Schedule

pytestmark = pytest.mark.usefixtures("compile_cache")


SCHEDULE = Schedule(6, 3, 0)  # captures at 2 4 6 8 ...: f1 f2 f0 f1


def participation(num_islands: int = 4, **options: Any) -> Participation:
    return Participation(num_islands, SCHEDULE, **options)


def test_all_islands_weigh_the_same_by_default():
    assert participation().weights(2, 1).tolist() == [1, 1, 1, 1]
    assert participation().active(0) == participation().active(10**9) == 4


def test_dropped_islands_are_drawn_anew_for_each_sync_and_always_alike():
    def drawn(seed: int) -> list[tuple]:
        dropping = participation(drop_rate=0.5, seed=seed)
        return [tuple(dropping.weights(step, fragment)) for step in range(2, 60, 2) for fragment in range(3)]

    draws = drawn(0)
    assert draws == drawn(0)
    assert len(set(draws)) == 2**4
    assert draws != [
        tuple(participation(drop_rate=0.5, seed=1).weights(s, f)) for s in range(2, 60, 2) for f in range(3)
    ]


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_drop_rate_is_the_share_that_is_lost(rate: float):
    weights = [participation(16, drop_rate=rate).weights(step, 0) for step in range(500)]
    assert np.mean(weights) == pytest.approx(1 - rate, abs=0.02)


def test_islands_train_by_the_schedule_of_their_count():
    growing = participation(counts=((0, 1), (3, 4), (5, 2)))
    assert [growing.active(completed) for completed in range(7)] == [1, 1, 1, 4, 4, 2, 2]
    # Inner step 3 is the last with one island, inner step 5 the last with four.
    assert growing.weights(3, 0).tolist() == [1, 0, 0, 0]
    assert growing.weights(5, 0).tolist() == [1, 1, 1, 1]
    assert growing.weights(6, 0).tolist() == [1, 1, 0, 0]


def test_shares_weigh_relative_to_the_largest():
    assert participation(shares=(1e30, 0, 5e29, 2.5e29)).weights(2, 1).tolist() == [1, 0, 0.5, 0.25]


def test_tokens_weigh_what_an_island_has_consumed_since_the_last_sync():
    # Fragment 1 is captured at 2, 8, 14. From 2 to 8 islands 2 and 3 train in steps 7 and 8 alone.
    counts = ((0, 4), (2, 2), (6, 4))
    tokens = participation(counts=counts, rows=lambda completed: 8)
    assert tokens.weights(2, 1).tolist() == [1, 1, 1, 1]
    np.testing.assert_allclose(tokens.weights(8, 1), [1, 1, 1 / 3, 1 / 3])
    # A batch that has doubled by then: 4 * 8 + 2 * 16 rows against 2 * 16.
    growing = participation(counts=counts, rows=lambda completed: 8 if completed < 6 else 16)
    np.testing.assert_allclose(growing.weights(8, 1), [1, 1, 0.5, 0.5])
    # A final sync after step 6 has seen all before.
    np.testing.assert_allclose(tokens.weights(8, 1, since=6), [1, 1, 1, 1])
