"""Trackers of islands: metrics of all of them reach the run's trackers, without a barrier between islands."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import jax
from jax._src import distributed  # the host reaches jax.distributed's key-value store in the same way
from levanter.tracker import CompositeTracker, Tracker

from .metrics import IslandRecord, StepRecord, metrics_of


class Board:
    """Where processes leave their islands' records for each other, on the host side.

    `jax.distributed`'s key-value store: to post and to look never waits for anyone.
    """

    def __init__(self, run_id: str, horizon: int):
        """Args:
        run_id: Names the run in the store.
        horizon: Steps after which a record is taken down: more than one process can be ahead of another.
        """
        client = distributed.global_state.client
        assert client is not None  # there are several processes
        self._client = client
        self._prefix = f"levanter_diloco/{run_id}"
        self._horizon = horizon

    def post(self, step: int, islands: Mapping[int, IslandRecord]) -> None:
        """Leaves the records of this process's islands for a step, in place of those it has left before."""
        records = json.dumps({island: asdict(record) for island, record in islands.items()})
        self._client.key_value_set(f"{self._prefix}/{step}/{jax.process_index()}", records, allow_overwrite=True)
        # The store keeps what is in it for the life of the job.
        if step >= self._horizon:
            self._client.key_value_delete(f"{self._prefix}/{step - self._horizon}/{jax.process_index()}")

    def look(self, step: int) -> dict[int, IslandRecord]:
        """Reads what all processes have left for a step so far."""
        found: dict[int, IslandRecord] = {}
        for _, records in self._client.key_value_dir_get(f"{self._prefix}/{step}/"):
            for island, record in json.loads(records).items():
                distance = {int(fragment): value for fragment, value in record["distance"].items()}
                found[int(island)] = IslandRecord(record["loss"], distance)
        return found


class IslandTracker(CompositeTracker):
    """The run's trackers, with the islands' metrics added to each step.

    With a board, everything logged for a step is held until all islands have reported it, so that trackers
    see whole steps in order, a little late. Remembers the last evaluation loss.
    """

    def __init__(self, loggers: list[Tracker], board: Board | None):
        super().__init__(loggers)
        self.eval_loss: float | None = None
        self._board = board
        self._trained = False
        self._held: dict[int, dict[str, Any]] = {}  # Any: whatever a hook logs
        self._records: dict[int, StepRecord] = {}

    def report(self, step: int, record: StepRecord) -> None:
        """Takes this process's record of `step`, the tracker's zero-based step; the newest one may come again."""
        self._trained = True
        if self._board is None:
            super().log(metrics_of(record.islands, record), step=step)
            return
        self._board.post(step, record.islands)
        self._records[step] = record
        self._release()

    def log(self, metrics: Mapping[str, Any], *, step: int | None, commit: bool | None = None) -> None:
        if "eval/loss" in metrics:
            self.eval_loss = float(metrics["eval/loss"])
        if not self._trained:
            # A finished run that is started again takes no step, and the host says 0 for the loss of its last one.
            metrics = {name: value for name, value in metrics.items() if name != "train/loss"}
        if self._board is None or step is None:
            super().log(metrics, step=step, commit=commit)
        else:
            self._held.setdefault(step, {}).update(metrics)

    def finish(self) -> None:
        if self._board is not None:
            self._release(everything=True)
        super().finish()

    def _release(self, everything: bool = False) -> None:
        # Hooks may still log for it after the step has been reported.
        newest = max(self._records, default=-1)
        for step in sorted(self._held.keys() | self._records.keys()):
            record = self._records.get(step)
            islands = {} if record is None or self._board is None else self._board.look(step)
            complete = record is None or islands.keys() >= record.speakers
            # The newest step is still being logged; an older one waits for the slowest island.
            if not everything and (step >= newest or not complete):
                return
            own = {} if record is None else metrics_of(islands, self._records.pop(step))
            super().log({**self._held.pop(step, {}), **own}, step=step)
