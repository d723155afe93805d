"""The sync schedule, against MaxText's and by properties."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from levanter_diloco.algorithm.schedule import Crossing, Schedule


def captures(schedule: Schedule, steps: range, since: int = 0) -> list[tuple[int, int]]:
    return [(t, f) for t in steps if (f := schedule.captured(t, since)) is not None]


def reduces(schedule: Schedule, steps: range, since: int = 0) -> list[tuple[int, int]]:
    return [(t, c.fragment) for t in steps if (c := schedule.crossing(t, since)) is not None and c.last]


def merges(schedule: Schedule, steps: range, since: int = 0) -> list[tuple[int, int]]:
    return [(t, f) for t in steps if (f := schedule.merged(t, since)) is not None]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    fragments = draw(st.integers(1, 40))
    period = draw(st.integers(1, 130))
    return Schedule(period, fragments, draw(st.integers(0, Schedule(period, fragments, 0).effective_period - 1)))


def test_vanilla_syncs_first_at_the_period():
    vanilla = Schedule(sync_period=3, num_fragments=1, overlap_steps=0)
    assert captures(vanilla, range(11)) == [(3, 0), (6, 0), (9, 0)]
    assert reduces(vanilla, range(11)) == merges(vanilla, range(11)) == captures(vanilla, range(11))


def test_period_of_one_syncs_every_step():
    assert captures(Schedule(1, 1, 0), range(5)) == [(1, 0), (2, 0), (3, 0), (4, 0)]


def test_streaming_order_is_1_2_3_0():
    # H = 8, P = 4: one fragment every 2 steps.
    expected = [(2, 1), (4, 2), (6, 3), (8, 0), (10, 1), (12, 2), (14, 3), (16, 0)]
    assert captures(Schedule(8, 4, 0), range(17)) == expected


@pytest.mark.parametrize(
    ("period", "fragments", "spacing", "effective"),
    [
        (100, 1, 100, 100),
        (100, 37, 3, 111),
        (100, 3, 33, 99),
        (36, 5, 7, 35),
        (3, 7, 1, 7),
        (1, 5, 1, 5),
        (12, 4, 3, 12),
    ],
)
def test_spacing_rounds_and_the_effective_period_follows(period: int, fragments: int, spacing: int, effective: int):
    schedule = Schedule(period, fragments, 0)
    assert (schedule.steps_per_sync, schedule.effective_period) == (spacing, effective)


def test_overlap_crosses_in_v_steps_and_merges_after_them():
    # H = 12, P = 4, V = 2: captures at 3 6 9 12, each crosses in two pieces.
    schedule = Schedule(12, 4, 2)
    assert captures(schedule, range(13)) == [(3, 1), (6, 2), (9, 3), (12, 0)]
    assert [schedule.crossing(t) for t in range(3, 7)] == [
        None,
        Crossing(1, 0, last=False),
        Crossing(1, 1, last=True),
        None,
    ]
    assert reduces(schedule, range(15)) == merges(schedule, range(15)) == [(5, 1), (8, 2), (11, 3), (14, 0)]


def test_overlap_of_one_step_crosses_in_one_piece():
    schedule = Schedule(12, 4, 1)
    assert [schedule.crossing(t) for t in range(3, 6)] == [None, Crossing(1, 0, last=True), None]


def test_overlap_longer_than_the_spacing_keeps_the_link_evenly_busy():
    # H = 8, P = 4, V = 5: captures every 2 steps, so two pieces, one in each step; up to three merges are pending.
    schedule = Schedule(8, 4, 5)
    crossings = [schedule.crossing(t) for t in range(3, 9)]
    assert crossings == [Crossing(f, piece, last=piece == 1) for f in (1, 2, 3) for piece in (0, 1)]
    assert merges(schedule, range(10)) == [(7, 1), (9, 2)]


def test_what_is_left_to_cross():
    # H = 12, P = 2, V = 4: fragment 1 is captured after step 6 and crosses in steps 7 to 10.
    schedule = Schedule(12, 2, 4)
    assert schedule.to_cross(6) == [Crossing(1, piece, last=piece == 3) for piece in range(4)]
    assert schedule.to_cross(9) == [Crossing(1, 3, last=True)]
    assert schedule.to_cross(10) == schedule.to_cross(5) == schedule.to_cross(9, since=6) == []
    assert Schedule(12, 2, 0).to_cross(6) == []


@given(schedules())
def test_every_capture_crosses_whole_before_it_merges(schedule: Schedule):
    steps = range(1, 3 * schedule.effective_period + 1)
    crossed: dict[int, list[int]] = {}
    for t in steps:
        if schedule.overlap_steps == 0 and (fragment := schedule.captured(t)) is not None:
            crossed[fragment] = []
        if (crossing := schedule.crossing(t)) is not None:
            pieces = crossed[crossing.fragment]
            pieces.append(crossing.piece)
            assert crossing.last == (len(pieces) == schedule.num_pieces)
        if (merged := schedule.merged(t)) is not None:
            assert crossed.pop(merged) == list(range(schedule.num_pieces))
        if schedule.overlap_steps > 0 and (fragment := schedule.captured(t)) is not None:
            crossed[fragment] = []
        left = [c.piece for c in schedule.to_cross(t)]
        assert left == [n for pieces in crossed.values() for n in range(len(pieces), schedule.num_pieces)]


def test_overlap_longer_than_the_spacing_merges_in_order_of_capture():
    # H = 4, P = 4, V = 3: at each step one fragment is captured and the one of three steps ago merges.
    schedule = Schedule(4, 4, 3)
    assert captures(schedule, range(1, 6)) == [(1, 1), (2, 2), (3, 3), (4, 0), (5, 1)]
    assert merges(schedule, range(1, 8)) == [(4, 1), (5, 2), (6, 3), (7, 0)]


def test_nothing_happens_before_the_first_capture():
    # t - V is negative here; MaxText's unsigned step wraps around and applies fragments.
    schedule = Schedule(sync_period=9, num_fragments=3, overlap_steps=8)
    assert merges(schedule, range(11)) == []
    assert merges(schedule, range(13)) == [(11, 1)]
    assert reduces(schedule, range(6)) == [] and reduces(schedule, range(7)) == [(6, 1)]


def test_settled_captures_have_no_events_left():
    # Captures at 3 (f1), 6 (f2), 9 (f0); a final sync at step 6 settles the first two.
    schedule = Schedule(9, 3, 2)
    assert captures(schedule, range(10), since=6) == [(9, 0)]
    assert reduces(schedule, range(12), since=6) == [(11, 0)]
    assert merges(schedule, range(12), since=6) == [(11, 0)]
    assert list(schedule.unmerged(7, since=6)) == []


def test_unmerged_are_the_captures_in_flight():
    # H = 4, P = 4, V = 3: after step 6 those of steps 4, 5 and 6 are in flight; that of step 3 merged in 6.
    schedule = Schedule(4, 4, 3)
    assert list(schedule.unmerged(6)) == [(4, 0), (5, 1), (6, 2)]
    assert list(schedule.unmerged(2)) == [(1, 1), (2, 2)]
    assert list(schedule.unmerged(0)) == []
    assert list(Schedule(4, 4, 0).unmerged(6)) == []


def test_last_captured_is_the_latest_step_or_zero():
    schedule = Schedule(8, 4, 0)  # f1 at 2, f2 at 4, f3 at 6, f0 at 8, f1 at 10
    assert [schedule.last_captured(f, 9) for f in range(4)] == [8, 2, 4, 6]
    assert [schedule.last_captured(f, 3) for f in range(4)] == [0, 2, 0, 0]


def test_unsynced_vanilla_is_a_run_that_ends_between_syncs():
    vanilla = Schedule(10, 1, 0)
    assert vanilla.unsynced(30, 0.0) == []
    assert vanilla.unsynced(34, 0.0) == [0]
    assert vanilla.unsynced(4, 0.0) == [0]


def test_unsynced_streaming_are_all_but_the_fragment_just_synced():
    assert Schedule(8, 4, 0).unsynced(10, 0.0) == [0, 2, 3]


def test_unsynced_after_a_merge_in_this_step():
    # H = 10, V = 3, captured at 10, merged at 13. With alpha 0 the islands are Theta then; with .5 they keep half.
    schedule = Schedule(10, 1, 3)
    assert schedule.unsynced(13, 0.0) == []
    assert schedule.unsynced(13, 0.5) == [0]
    assert schedule.unsynced(14, 0.0) == [0]
    # In flight at 11 and 12: it merges before the final sync looks, and nothing is left with alpha 0.
    assert schedule.unsynced(11, 0.0) == []
    assert schedule.unsynced(11, 0.5) == [0]


def test_unsynced_counts_from_a_final_sync():
    vanilla = Schedule(10, 1, 0)
    assert vanilla.unsynced(34, 0.0, since=34) == []
    assert vanilla.unsynced(36, 0.0, since=34) == [0]


def test_unsynced_sees_steps_after_a_final_sync_that_cut_an_overlap_short():
    # Captured at 10 and merged early, by the final sync of step 12. A longer run does steps 13 and 14 on top:
    # the merge planned for step 15 will never come, so they are unsynced.
    assert Schedule(10, 1, 5).unsynced(14, 0.0, since=12) == [0]


@given(schedules())
def test_every_fragment_is_captured_once_per_effective_period(schedule: Schedule):
    period = schedule.effective_period
    for start in (1, period + 1):
        events = captures(schedule, range(start, start + period))
        assert sorted(f for _, f in events) == list(range(schedule.num_fragments))
        spacings = [later - earlier for (earlier, _), (later, _) in pairwise(events)]
        assert spacings == [schedule.steps_per_sync] * (schedule.num_fragments - 1)


@given(schedules())
def test_reduce_and_merge_follow_each_capture(schedule: Schedule):
    end = 2 * schedule.effective_period
    events = captures(schedule, range(end + 1))
    lag = min(schedule.overlap_steps, schedule.steps_per_sync)
    assert reduces(schedule, range(end + lag + 1)) == [(t + lag, f) for t, f in events]
    assert merges(schedule, range(end + schedule.overlap_steps + 1)) == [
        (t + schedule.overlap_steps, f) for t, f in events
    ]


@given(schedules(), st.data())
def test_unmerged_are_captured_but_not_merged(schedule: Schedule, data: st.DataObject):
    step = data.draw(st.integers(0, 3 * schedule.effective_period))
    since = data.draw(st.integers(0, step))
    captured = captures(schedule, range(step + 1), since)
    merged = [(t - schedule.overlap_steps, f) for t, f in merges(schedule, range(step + 1), since)]
    assert list(schedule.unmerged(step, since)) == [event for event in captured if event not in merged]
    in_flight = [f for _, f in schedule.unmerged(step, since)]
    assert len(in_flight) == len(set(in_flight))


@given(schedules(), st.data())
def test_events_of_a_split_run_are_those_of_the_whole_run(schedule: Schedule, data: st.DataObject):
    # All that a resumed run has is its step count: a fresh Schedule of the same options goes on from there.
    end = 2 * schedule.effective_period + schedule.overlap_steps
    resume = data.draw(st.integers(0, end))
    again = Schedule(schedule.sync_period, schedule.num_fragments, schedule.overlap_steps)
    for events in (captures, reduces, merges):
        whole = events(schedule, range(1, end + 1))
        assert events(schedule, range(1, resume + 1)) + events(again, range(resume + 1, end + 1)) == whole


@given(schedules(), st.data(), st.sampled_from([0.0, 0.5]))
def test_unsynced_agrees_with_islands_that_note_their_steps(schedule: Schedule, data: st.DataObject, alpha: float):
    # `mine[f]`: the steps in an island's fragment that no outer step has seen. Nothing after a final sync.
    since = data.draw(st.integers(0, schedule.effective_period))
    step = data.draw(st.integers(since, since + 2 * schedule.effective_period))
    mine = [set[int]() for _ in range(schedule.num_fragments)]
    seen = [set[int]() for _ in range(schedule.num_fragments)]

    def merge(fragment: int) -> None:
        if alpha == 0:
            mine[fragment].clear()  # overwritten by Theta, whatever it was
        else:
            mine[fragment] -= seen[fragment]

    for t in range(since + 1, step + 1):
        for steps in mine:
            steps.add(t)
        if (fragment := schedule.captured(t, since)) is not None:
            seen[fragment] = set(mine[fragment])
        if (fragment := schedule.merged(t, since)) is not None:
            merge(fragment)
    for _, fragment in schedule.unmerged(step, since):
        merge(fragment)
    assert schedule.unsynced(step, alpha, since) == [f for f, steps in enumerate(mine) if steps]
