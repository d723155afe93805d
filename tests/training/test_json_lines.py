"""The JSON-lines tracker."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from levanter_diloco.training.json_lines import JsonLinesConfig, JsonLinesTracker


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_writes_one_line_for_each_step(tmp_path: Path):
    path = tmp_path / "new" / "metrics.jsonl"
    tracker = JsonLinesTracker(path)
    for step in range(3):
        tracker.log({"train/loss": jnp.float32(2.0 - step)}, step=step)
        tracker.log({"throughput": {"tokens": 5}}, step=step)
    assert lines(path) == [
        {"step": 0, "train/loss": 2.0, "throughput/tokens": 5},
        {"step": 1, "train/loss": 1.0, "throughput/tokens": 5},
    ]
    tracker.finish()
    assert lines(path)[2:] == [{"step": 2, "train/loss": 0.0, "throughput/tokens": 5}]


def test_json_lines_keeps_one_line_where_a_stepless_metric_comes_between(tmp_path: Path):
    tracker = JsonLinesTracker(tmp_path / "metrics.jsonl")
    tracker.log({"train/loss": 2.0}, step=0)
    tracker.log({"note": 1}, step=None)
    tracker.log({"throughput": 5}, step=0)
    tracker.finish()
    assert [line for line in lines(tmp_path / "metrics.jsonl") if line.get("step") == 0] == [
        {"step": 0, "train/loss": 2.0, "throughput": 5}
    ]


def test_json_lines_writes_summaries_and_hyperparameters_at_once(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonLinesTracker(path)
    tracker.log_hyperparameters({"sync_period": 5})
    tracker.log_summary({"diloco/islands": 2})
    tracker.log_artifact(Path("model.bin"), name="model", type="weights")
    assert lines(path) == [
        {"hyperparameters": {"sync_period": 5}},
        {"summary": {"diloco/islands": 2}},
        {"artifact": "model.bin", "name": "model", "type": "weights"},
    ]


def test_json_lines_of_a_resumed_run_appends(tmp_path: Path):
    path = str(tmp_path / "metrics.jsonl")
    for step in range(2):
        tracker = JsonLinesConfig(path).init("run")
        tracker.log({"train/loss": 1.0}, step=step)
        tracker.finish()
    assert [line["step"] for line in lines(Path(path))] == [0, 1]
