"""Layouts: their facts, what is in flight, and what is said of a change."""

import pytest

from levanter_diloco.algorithm.schedule import Schedule
from levanter_diloco.islands.layout import InFlight, Layout, explain
from levanter_diloco.options.config import DiLoCoConfig

BLOCK = DiLoCoConfig(sync_period=6, num_fragments=3, overlap_steps=2, wire="int4", error_feedback=True)


def test_facts_come_back_as_the_layout_that_they_are_of() -> None:
    layout = Layout(BLOCK, 4, {"embed": 2})
    facts = layout.facts
    assert (facts["islands"], facts["num_fragments"], facts["overlap_steps"]) == (4, 3, 2)
    again = Layout.stored(facts, DiLoCoConfig())
    assert again.facts == facts
    assert again.partition == layout.partition


def test_shards_are_facts_of_a_balanced_partition() -> None:
    layout = Layout(DiLoCoConfig(partition="balanced"), 2, {"embed": 4})
    assert layout.facts["shards_of_embed"] == 4
    assert Layout.stored(layout.facts, DiLoCoConfig()).sharding == {"embed": 4}


@pytest.mark.parametrize(
    ("step", "in_flight"),
    [
        # H = 6, P = 3, V = 2: captured after 2, crosses in steps 3 and 4, merges after 4.
        (1, InFlight([], [], False)),
        (2, InFlight([], [1], False)),
        (3, InFlight([], [1], True)),
    ],
)
def test_in_flight_by_hand(step: int, in_flight: InFlight) -> None:
    assert InFlight.of(Schedule(6, 3, 2), step, 0) == in_flight


def test_fragment_that_has_crossed_waits_for_its_merge() -> None:
    # H = 9, P = 3, V = 5: captured after 3, crossed whole in step 6, merged after 8; fragment 2 is captured after 6.
    assert InFlight.of(Schedule(9, 3, 5), 7, 0) == InFlight([1], [2], True)


def test_change_is_said_with_what_becomes_of_the_state() -> None:
    before, after = Layout(BLOCK, 2, {}), Layout(DiLoCoConfig(resume_islands="mean"), 4, {})
    said = explain(before, after, InFlight([1], [2], True))
    for words in ("islands 2 -> 4", "num_fragments 3 -> 1", "resume_islands mean", "[1] in flight are merged now"):
        assert words in said
    assert "fragment 2 in flight is dropped" in said and "error feedback starts" not in said
