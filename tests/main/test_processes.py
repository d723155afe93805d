"""The quickstart in two processes, launched as islands with networks of their own, against one process."""

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from helpers.command_runs import (
    COMMAND,
    Finished,
    Workplace,
    arrays,
    assert_same,
    checkpoint,
    corrupt,
    metrics,
    records,
)
from helpers.paths import ROOT

pytestmark = [pytest.mark.entry, pytest.mark.slow]

LAUNCH = (sys.executable, str(ROOT / "scripts" / "launch_tpu.py"), "local", "--processes", "2", "--devices", "2")

SHORT = {"num_train_steps": 9, "steps_per_eval": 9, "max_eval_batches": 1}
DILOCO = {"sync_period": 6, "overlap_steps": 1, "mixing_alpha": 0.5}
"""A capture every second step: fragments 1 2 0 1 of steps 2 4 6 8."""

EVERY_PROCESS = """
from dataclasses import dataclass
from pathlib import Path
import jax
from levanter.tracker import TrackerConfig
from levanter_diloco.training.json_lines import JsonLinesTracker

@TrackerConfig.register_subclass("every_process")
@dataclass
class EveryProcessConfig(TrackerConfig):
    path: str = ""

    def init(self, run_id):
        name = f"process_{jax.process_index()}.jsonl" if jax.process_index() else "metrics.jsonl"
        return JsonLinesTracker(Path(self.path) / name)
"""
"""A plugin: the package's own tracker writes on process 0 alone."""


@pytest.fixture(scope="session")
def quickstart(workplace: Workplace) -> Workplace:
    """The folder that the quickstart's paths start from, and the plugin on PYTHONPATH."""
    root = workplace.root / "quickstart"
    (root / ".quickstart").mkdir(parents=True)
    (root / ".quickstart" / "data").symlink_to(workplace.root / "text")
    (root / "every_process.py").write_text(EVERY_PROCESS)
    info = root / "every_process-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: every-process\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[levanter.plugins]\nevery_process = every_process\n")
    return Workplace(root, workplace.compiled)


def config(quickstart: Workplace, name: str) -> Path:
    """The quickstart's YAML made short, with what the run leaves behind in a folder of its own."""
    folder = quickstart.root / name
    options = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    trainer = options["trainer"] | SHORT | {"id": name}
    trainer["diloco"] |= DILOCO
    trainer["tracker"] = {"type": "every_process", "path": str(folder)}
    trainer["checkpointer"] |= {"base_path": str(folder / "checkpoints"), "keep": [{"every": 4}]}
    folder.mkdir(exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(options | {"trainer": trainer}))
    return path


def environment(quickstart: Workplace) -> dict[str, str]:
    return quickstart.environment({"PYTHONPATH": f"{quickstart.root}:{ROOT}"})


@contextlib.contextmanager
def launched(quickstart: Workplace, name: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """Both processes of a run; what still lives at the end is killed. The launcher's stdout is theirs too."""
    settings = ["--config", str(config(quickstart, name)), "--run_id", name, "--", *flags]
    with log(quickstart, name).open("a") as stderr:
        pipes = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
        launcher = subprocess.Popen([*LAUNCH, *settings], env=environment(quickstart), cwd=quickstart.root, **pipes)
    try:
        yield launcher
    finally:
        launcher.terminate()
        launcher.wait()


def log(quickstart: Workplace, name: str) -> Path:
    return quickstart.root / name / "stderr.txt"


def finish(launcher: subprocess.Popen[str], log: Path) -> None:
    launcher.communicate(timeout=280)
    assert launcher.returncode == 0, log.read_text()[-4000:]


@pytest.fixture(scope="session")
def one(quickstart: Workplace) -> Path:
    """The folder of a run of one process with four devices."""
    words = ["--config_path", str(config(quickstart, "one"))]
    pipes = {"capture_output": True, "text": True, "timeout": 280}
    done = subprocess.run([*COMMAND, *words], env=environment(quickstart), cwd=quickstart.root, **pipes)
    return Finished(quickstart.root / "one", done.returncode, done.stdout, done.stderr).succeeded().folder


@pytest.fixture(scope="session")
def two(quickstart: Workplace) -> Path:
    """The folder of an uninterrupted run of two processes."""
    with launched(quickstart, "two") as launcher:
        finish(launcher, log(quickstart, "two"))
    return quickstart.root / "two"


def other(folder: Path) -> dict[int, dict]:
    """What the second process reports, by step."""
    lines = (folder / "process_1.jsonl").read_text().splitlines()
    return {line["step"]: line for line in map(json.loads, lines) if "step" in line}


def test_losses_of_each_island_are_those_of_one_process(one: Path, two: Path) -> None:
    assert sorted(metrics(one)) == sorted(metrics(two)) == list(range(9))
    for step, line in metrics(one).items():
        for island in range(2):
            name = f"train/loss_island_{island}"
            assert metrics(two)[step][name] == pytest.approx(line[name], abs=1e-5), (step, name)


def test_mean_loss_is_over_both_islands_at_each_step(two: Path) -> None:
    for step, line in metrics(two).items():
        mean = (line["train/loss_island_0"] + line["train/loss_island_1"]) / 2
        assert line["train/loss"] == pytest.approx(mean, abs=1e-6), step


def test_steps_are_written_once_and_in_order(two: Path) -> None:
    assert [line["step"] for line in records(two) if "step" in line] == list(range(9))


def test_metrics_of_a_sync_are_those_of_one_process(one: Path, two: Path) -> None:
    for step, line in metrics(one).items():
        own = {
            name: value for name, value in line.items() if name.startswith(("diloco/", "eval/")) and "time" not in name
        }
        assert own.keys() <= metrics(two)[step].keys()
        for name, value in own.items():
            assert metrics(two)[step][name] == pytest.approx(value, rel=1e-4, abs=1e-5), (step, name)


def test_each_process_reports_the_metrics_of_all_islands(two: Path) -> None:
    for step, line in metrics(two).items():
        own = {name: value for name, value in line.items() if name.startswith(("diloco/", "train/loss"))}
        assert {name: other(two)[step].get(name) for name in own} == own, step


def test_checkpoint_is_that_of_one_process(one: Path, two: Path) -> None:
    theirs, ours = arrays(checkpoint(one, 8)), arrays(checkpoint(two, 8))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=0, atol=1e-4, err_msg=name)


def test_damaged_checkpoint_is_passed_over_by_all_processes(quickstart: Workplace, two: Path) -> None:
    folder = quickstart.root / "two_damaged"
    shutil.copytree(checkpoint(two, 4), checkpoint(folder, 4))
    # One that looks newer is damaged, as process 1 finds.
    shutil.copytree(checkpoint(two, 4), checkpoint(folder, 6))
    metadata = json.loads((checkpoint(folder, 6) / "metadata.json").read_text())
    (checkpoint(folder, 6) / "metadata.json").write_text(json.dumps(metadata | {"step": 6}))
    corrupt(checkpoint(folder, 6), "islands/key")
    with launched(quickstart, "two_damaged", "--trainer.diloco.on_damaged_checkpoint", "previous") as launcher:
        finish(launcher, log(quickstart, "two_damaged"))
    said = log(quickstart, "two_damaged").read_text()
    assert "step-6 is damaged: islands/key differs" in said and "Resuming training from step" in said
    assert [path.name for path in (checkpoint(folder, 8).parent / "damaged").iterdir()] == ["step-6"]
    assert_same(arrays(checkpoint(folder, 8)), arrays(checkpoint(two, 8)))
    for step, line in metrics(folder).items():
        assert line["train/loss"] == metrics(two)[step]["train/loss"], step
