"""A tracker that writes one JSON object a line to a local file: `tracker: {type: json_lines, path: ...}`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from levanter.tracker.json_logger import _flatten, _to_jsonable
from levanter.tracker.tracker import NoopTracker, Tracker, TrackerConfig


class JsonLinesTracker(Tracker):
    """Appends a line for each step, `{"step": ..., "<metric>": ...}`, and one for each summary.

    The metrics of one step arrive in several calls; they are written together when the next step begins.
    """

    name = "json_lines"

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._step: int | None = None
        self._metrics: dict[str, Any] = {}  # Any: whatever a hook logs

    def log(self, metrics: Mapping[str, Any], *, step: int | None, commit: bool | None = None) -> None:
        if step is None:
            self._write(_flatten(metrics))
            return
        if step != self._step:
            self._flush()
        self._step = step
        self._metrics |= _flatten(metrics)

    def log_summary(self, metrics: Mapping[str, Any]) -> None:
        self._write({"summary": _flatten(metrics)})

    def log_hyperparameters(self, hparams: dict[str, Any]) -> None:
        self._write({"hyperparameters": hparams})

    def log_artifact(self, artifact_path: Any, *, name: str | None = None, type: str | None = None) -> None:
        self._write({"artifact": str(artifact_path), "name": name, "type": type})

    def finish(self) -> None:
        self._flush()

    def _flush(self) -> None:
        if self._metrics:
            self._write({"step": self._step, **self._metrics})
        self._metrics = {}

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(_to_jsonable(record)) + "\n")


@TrackerConfig.register_subclass("json_lines")
@dataclass
class JsonLinesConfig(TrackerConfig):
    """Where the lines go. Only process 0 writes; a resumed run appends."""

    path: str = "metrics.jsonl"

    def init(self, run_id: str | None) -> Tracker:
        del run_id
        return JsonLinesTracker(Path(self.path)) if jax.process_index() == 0 else NoopTracker()
