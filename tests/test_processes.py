"""Two processes of two devices, an island in each: losses, metrics and checkpoints of one process with four."""

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import COMMAND, STREAMING, Finished, Workplace, arrays, assert_same, checkpoint, metrics, records

pytestmark = [pytest.mark.entry, pytest.mark.slow]

SHORT = {"trainer__num_train_steps": 9, "trainer__steps_per_eval": 9, "trainer__max_eval_batches": 1}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def configs(workplace: Workplace, name: str) -> list[Path]:
    """The YAML of each process: the same but for its id in the cluster."""
    cluster = {"coordinator_address": f"127.0.0.1:{free_port()}", "num_processes": 2}
    paths = []
    for process in range(2):
        own = {"initialize_jax_distributed": True, **cluster, "process_id": process}
        path = workplace.config(name, STREAMING, **SHORT, trainer__distributed=own)
        paths.append(path.rename(path.with_name(f"process_{process}.yaml")))
    return paths


@contextlib.contextmanager
def started(workplace: Workplace, name: str) -> Iterator[list[subprocess.Popen]]:
    """Both processes of a run; what still lives at the end is killed."""
    gloo = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    processes = [
        workplace.start(config, f"stderr_{config.stem}.txt", devices=2, **gloo) for config in configs(workplace, name)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def finish(processes: list[subprocess.Popen], folder: Path) -> None:
    for number, process in enumerate(processes):
        code = process.wait(timeout=240)
        assert code == 0, (folder / f"stderr_process_{number}.txt").read_text()[-4000:]


@pytest.fixture(scope="session")
def one(workplace: Workplace) -> Finished:
    return workplace.run(COMMAND, workplace.config("one_process", STREAMING, **SHORT)).succeeded()


@pytest.fixture(scope="session")
def two(workplace: Workplace) -> Path:
    """The folder of an uninterrupted run of two processes."""
    with started(workplace, "two_processes") as processes:
        finish(processes, workplace.root / "two_processes")
    return workplace.root / "two_processes"


def test_losses_of_each_island_are_those_of_one_process(one: Finished, two: Path) -> None:
    for step, line in metrics(one.folder).items():
        for island in range(2):
            name = f"train/loss_island_{island}"
            assert metrics(two)[step][name] == pytest.approx(line[name], abs=1e-5), (step, name)


def test_mean_loss_is_over_both_islands_at_each_step(two: Path) -> None:
    for step, line in metrics(two).items():
        mean = (line["train/loss_island_0"] + line["train/loss_island_1"]) / 2
        assert line["train/loss"] == pytest.approx(mean, abs=1e-6), step


def test_steps_are_written_once_and_in_order(two: Path) -> None:
    assert [line["step"] for line in records(two) if "step" in line] == list(range(9))


def test_metrics_of_a_sync_are_those_of_one_process(one: Finished, two: Path) -> None:
    for step, line in metrics(one.folder).items():
        own = {
            name: value for name, value in line.items() if name.startswith(("diloco/", "eval/")) and "time" not in name
        }
        assert own.keys() <= metrics(two)[step].keys()
        for name, value in own.items():
            assert metrics(two)[step][name] == pytest.approx(value, rel=1e-4, abs=1e-5), (step, name)


def test_checkpoint_is_that_of_one_process(one: Finished, two: Path) -> None:
    theirs, ours = arrays(checkpoint(one.folder, 8)), arrays(checkpoint(two, 8))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].shape == value.shape
        assert ours[name] == pytest.approx(value, abs=1e-4), name


def test_killed_processes_end_in_the_state_of_an_uninterrupted_run(workplace: Workplace, two: Path) -> None:
    folder = workplace.root / "two_killed"
    with started(workplace, "two_killed") as processes:
        deadline = time.monotonic() + 120
        while not (checkpoint(folder, 3) / "metadata.json").is_file():
            assert all(process.poll() is None for process in processes)
            assert time.monotonic() < deadline
            time.sleep(0.005)
        for process in processes:
            process.kill()
        assert [process.wait() for process in processes] == [-signal.SIGKILL] * 2
    with started(workplace, "two_killed") as processes:
        finish(processes, folder)
    assert "Resuming training from step" in (folder / "stderr_process_0.txt").read_text()
    assert_same(arrays(checkpoint(folder, 8)), arrays(checkpoint(two, 8)))
    for step, line in metrics(folder).items():
        assert line["train/loss"] == metrics(two)[step]["train/loss"], step
