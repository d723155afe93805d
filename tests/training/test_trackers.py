"""Trackers: how the islands' metrics reach them, in order and whole."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import pytest

from helpers.step_records import record
from helpers.toy_model import Recorder
from levanter_diloco.training.metrics import (
    IslandRecord,
    StepRecord,
    SyncRecord,
)
from levanter_diloco.training.trackers import Board, IslandTracker


class SharedBoard(Board):
    """The key-value store of a run, in memory; each process posts its own islands."""

    def __init__(self) -> None:
        self.posted: dict[int, dict[int, IslandRecord]] = {}

    def post(self, step: int, islands: Mapping[int, IslandRecord]) -> None:
        self.posted.setdefault(step, {}).update(islands)

    def look(self, step: int) -> dict[int, IslandRecord]:
        return dict(self.posted.get(step, {}))


class OrderedRecorder(Recorder):
    """Keeps also every call, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int | None, dict[str, Any]]] = []
        self.finished = False

    def log(self, metrics: Mapping[str, Any], *, step: int | None, commit: bool | None = None) -> None:
        self.calls.append((step, dict(metrics)))
        super().log(metrics, step=step, commit=commit)

    def finish(self) -> None:
        self.finished = True


def test_tracker_without_a_board_logs_at_once():
    recorder = OrderedRecorder()
    tracker = IslandTracker([recorder], None)
    tracker.report(0, record({0: 1.0, 1: 3.0}))
    assert recorder.steps[0]["train/loss"] == 2.0
    tracker.log({"grad/norm": 5.0}, step=0)
    assert recorder.steps[0]["grad/norm"] == 5.0


def test_tracker_of_a_process_that_owns_no_island_logs_nothing_of_islands():
    # An island over two processes: the second one speaks for none, and has no board.
    recorder = OrderedRecorder()
    tracker = IslandTracker([recorder], None)
    tracker.report(0, record({}))
    assert not any(name.startswith("train/loss") for name in recorder.steps.get(0, {}))


def test_tracker_holds_a_step_until_all_islands_have_reported_it():
    board, recorder = SharedBoard(), OrderedRecorder()
    tracker = IslandTracker([recorder], board)  # this process has island 0
    tracker.report(0, record({0: 1.0}))
    tracker.log({"throughput": 9.0}, step=0)
    tracker.report(1, record({0: 2.0}))
    assert recorder.calls == []

    board.post(0, {1: IslandRecord(3.0)})
    board.post(1, {1: IslandRecord(4.0)})
    tracker.report(2, record({0: 5.0}))
    # Step 2 is still being logged, whoever has reported it.
    board.post(2, {1: IslandRecord(6.0)})
    assert [step for step, _ in recorder.calls] == [0, 1]
    assert recorder.steps[0]["train/loss"] == 2.0
    assert recorder.steps[0]["throughput"] == 9.0
    assert recorder.steps[1]["train/loss"] == 3.0


def test_tracker_keeps_the_order_of_steps():
    # Island 1 reports step 1 before step 0 can be seen: step 1 has to wait.
    board, recorder = SharedBoard(), OrderedRecorder()
    tracker = IslandTracker([recorder], board)
    board.post(1, {1: IslandRecord(4.0)})
    for step in range(3):
        tracker.report(step, record({0: float(step)}))
    assert recorder.calls == []
    board.post(0, {1: IslandRecord(3.0)})
    board.post(2, {1: IslandRecord(5.0)})
    tracker.report(3, record({0: 3.0}))
    assert [step for step, _ in recorder.calls] == [0, 1, 2]


def test_tracker_logs_what_has_no_step_at_once():
    recorder = OrderedRecorder()
    IslandTracker([recorder], SharedBoard()).log({"note": 1}, step=None)
    assert recorder.calls == [(None, {"note": 1})]


def test_tracker_takes_the_record_of_the_newest_step_again():
    # Where the data ends the final sync comes when its step has been reported.
    board, recorder = SharedBoard(), OrderedRecorder()
    tracker = IslandTracker([recorder], board)
    step = record({0: 1.0})
    tracker.report(0, step)
    board.post(0, {1: IslandRecord(3.0, {0: 4.0})})
    step.syncs[0], step.islands[0].distance[0] = SyncRecord(2.5, 1.0, 8, (1.0, 1.0)), 3.0
    tracker.report(0, step)
    tracker.finish()
    [(_, metrics)] = recorder.calls
    assert metrics["train/loss"] == 2.0 and metrics["diloco/outer_grad_cosine"] == 0.0


def test_tracker_waits_for_islands_that_have_left_since_the_capture():
    board, recorder = SharedBoard(), OrderedRecorder()
    tracker = IslandTracker([recorder], board)
    syncs = {0: SyncRecord(2.5, 1.0, 8, (1.0, 1.0))}
    tracker.report(0, StepRecord({0: IslandRecord(1.0, {0: 3.0})}, syncs, 8, 1))
    tracker.report(1, record({0: 2.0}, active=1))
    assert recorder.calls == []
    board.post(0, {1: IslandRecord(None, {0: 4.0})})
    tracker.report(2, record({0: 2.0}, active=1))
    assert recorder.steps[0]["train/loss"] == 1.0 and recorder.steps[0]["diloco/island_distance"] == 3.5


def test_tracker_finish_flushes_in_order_and_finishes():
    board, recorder = SharedBoard(), OrderedRecorder()
    tracker = IslandTracker([recorder], board)
    tracker.report(0, record({0: 1.0}))
    board.post(0, {1: IslandRecord(3.0)})
    tracker.report(1, record({0: 2.0}))  # island 1 died before it
    tracker.log({"eval/loss": 0.5}, step=1)
    tracker.finish()
    assert [step for step, _ in recorder.calls] == [0, 1]
    assert recorder.steps[0]["train/loss"] == 2.0
    assert recorder.steps[1]["train/loss_island_0"] == 2.0
    assert recorder.steps[1]["eval/loss"] == 0.5
    assert recorder.finished


def test_tracker_gives_no_cosine_while_an_island_is_missing():
    # The norm of the mean is over three islands; with the distances of two the cosine would be wrong (3.5 here).
    recorder = OrderedRecorder()
    tracker = IslandTracker([recorder], SharedBoard())
    islands = {0: IslandRecord(1.0, {0: 1.0}), 1: IslandRecord(1.0, {0: 1.0})}
    tracker.report(0, StepRecord(islands, {0: SyncRecord(1.5, 1.0, 4, (1.0, 1.0, 1.0))}, 4, 3))
    tracker.finish()
    assert "diloco/outer_grad_cosine" not in recorder.steps[0]


def test_tracker_remembers_the_last_evaluation_loss():
    for board in (None, SharedBoard()):
        tracker = IslandTracker([OrderedRecorder()], board)
        assert tracker.eval_loss is None
        tracker.log({"eval/loss": 2.0}, step=3)
        tracker.log({"train/loss": 9.0}, step=4)
        tracker.log({"eval/loss": jnp.float32(1.5)}, step=5)
        assert tracker.eval_loss == 1.5


@pytest.mark.parametrize("board", [False, True])
def test_tracker_of_a_run_that_takes_no_step_logs_no_loss(board: bool) -> None:
    recorder = OrderedRecorder()
    tracker = IslandTracker([recorder], SharedBoard() if board else None)
    tracker.log({"train/loss": 0.0, "global_step": 13}, step=13)
    tracker.finish()
    assert recorder.steps[13] == {"global_step": 13}
