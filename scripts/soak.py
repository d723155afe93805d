#!/usr/bin/env python3
"""Long tests that no CI runs: kills at random moments, a long run through every mishap, many drawn options.

    soak.py kills --kills 20      # two processes, SIGKILLed again and again: the same bits as without
    soak.py steps --steps 3000    # lost gradients, islands that come and go, NaNs, kills: memory flat, Theta equal
    soak.py properties --count 50 # tests/test_properties.py with more examples, drawn anew

Each says what it saw and exits with 1 where that is not as it should be. Processes are forked from this one, after the
imports and before any device is touched; from there on each lives and dies alone.
"""

import argparse
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

STREAMING = {"sync_period": 6, "num_fragments": 3, "overlap_steps": 1, "mixing_alpha": 0.5, "wire": "int8"}
PROCESSES = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["kills", "steps", "properties"])
    parser.add_argument("--kills", type=int, default=20, help="SIGKILLs; of `steps`, a few are enough")
    parser.add_argument("--steps", type=int, default=3000, help="steps of `steps`")
    parser.add_argument("--count", type=int, default=50, help="examples of `properties`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where runs keep what they make; a temporary one if unset")
    args = parser.parse_args()
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1" if args.command == "kills" else "4",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "HF_HUB_OFFLINE": "1",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    # No TemporaryDirectory: the processes forked from here would clean it up at their own exit.
    folder = (args.folder or Path(tempfile.mkdtemp())).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "xla")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    draw = random.Random(args.seed)
    try:
        if args.command == "kills":
            return kills(folder, args.kills, draw)
        if args.command == "steps":
            return steps(folder, args.steps, args.kills, draw)
        return properties(args.count, args.seed)
    finally:
        if args.folder is None:
            shutil.rmtree(folder)


def fork(work: Callable[[], Any], log: Path) -> int:
    """Runs `work` in a process of its own, whose output goes to `log`; returns its id."""
    sys.stdout.flush()
    # jax warns of the threads that imports have started; none of them holds what a child needs.
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    if pid := os.fork():
        return pid
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        work()
        code = 0
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def ended(pid: int) -> int | None:
    """The exit status of a process of ours, if it has ended; minus the signal that ended it."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


# --- Kills of a run of several processes


def kills(folder: Path, count: int, draw: random.Random) -> int:
    """Compares the last checkpoint of a run that is killed `count` times with that of one that is not."""
    from helpers.command_runs import Workplace, arrays, checkpoint  # pyrefly: ignore[missing-import]  it lies in tests
    from levanter_diloco.cli import PROGRAMS
    from levanter_diloco.console import leave
    from levanter_diloco.main.program import run
    from make_corpus import prepare

    __import__(PROGRAMS["train_lm"])  # in this process alone
    place, last = Workplace(folder, folder / "compiled"), 4 * count + 5
    if not (folder / "text").exists():
        prepare(folder / "text")

    def start(name: str) -> list[int]:
        each = {"trainer__num_train_steps": last + 1, "trainer__steps_per_eval": 10**6, "trainer__train_batch_size": 4}
        each |= {
            "model__num_layers": 2,
            "model__hidden_dim": 16,
            "model__max_seq_len": 16,
            "trainer__max_eval_batches": 1,
        }
        config = place.config(name, {**STREAMING, "ici_islands": PROCESSES}, **each)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        cluster = {
            "initialize_jax_distributed": "true",
            "num_processes": PROCESSES,
            "coordinator_address": coordinator,
        }
        flags = [word for name, value in cluster.items() for word in (f"--trainer.distributed.{name}", str(value))]

        def work(process: int) -> None:
            run(PROGRAMS["train_lm"], ["--config_path", str(config), *flags, *own_id(process)])
            leave()

        def own_id(process: int) -> list[str]:
            return ["--trainer.distributed.process_id", str(process)]

        return [fork(lambda p=p: work(p), folder / f"{name}_{p}.log") for p in range(PROCESSES)]

    began = time.monotonic()
    for pid in start("straight"):
        if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            return complain(f"the uninterrupted run ended with {code}", folder)
    print(f"uninterrupted: {last + 1} steps in {time.monotonic() - began:.0f} s", flush=True)
    saves = folder / "killed" / "checkpoints" / "killed"
    cut = 0
    for number in range(count):
        pids = start("killed")
        before, in_save = completed(saves), number % 2 == 0
        moment = wait_for_moment(pids, saves, before + draw.randint(1, 3), in_save, draw)
        if moment is None:
            return complain("the run ended, or hung, before it could be killed", folder)
        draw.shuffle(pids)
        for pid in pids:
            kill(pid)
            time.sleep(draw.uniform(0, 0.2))  # the other one may notice, or not
        broken = [path.name for path in saves.glob("step-*") if not (path / "metadata.json").exists()]
        cut += bool(broken)
        print(f"kill {number + 1}: after step {completed(saves)}, in a save of {broken or 'none'}", flush=True)
    for pid in start("killed"):
        if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            return complain(f"the last resume ended with {code}", folder)
    ours, theirs = (arrays(checkpoint(folder / name, last)) for name in ("killed", "straight"))
    different = [name for name in theirs.keys() | ours.keys() if not same(ours.get(name), theirs.get(name))]
    verdict = f"{len(theirs)} arrays of step {last}" + (f", {len(different)} differ: {different}" if different else "")
    print(f"{count} kills, {cut} of them in the middle of a save; bit-equal: {not different} ({verdict})")
    return int(bool(different) or (count > 1 and not cut))


def completed(saves: Path) -> int:
    """The step of the last complete checkpoint; -1 if there is none."""
    done = [int(path.parent.name.removeprefix("step-")) for path in saves.glob("step-*/metadata.json")]
    return max(done, default=-1)


def wait_for_moment(pids: list[int], saves: Path, step: int, in_save: bool, draw: random.Random) -> float | None:
    """Waits until `step` is saved and a little longer, or is being saved; None where that never comes."""
    delay, deadline = draw.uniform(0, 0.3), time.monotonic() + 300
    while time.monotonic() < deadline:
        if any(ended(pid) is not None for pid in pids):
            return None
        begun = {int(path.name.removeprefix("step-")) for path in saves.glob("step-*")}
        if in_save and max(begun, default=-1) >= step and max(begun) > completed(saves):
            return 0.0
        if not in_save and completed(saves) >= step:
            time.sleep(delay)
            return delay
        time.sleep(0.002)
    return None


def same(ours: Any, theirs: Any) -> bool:  # Any: arrays, or None where one is missing
    if ours is None or theirs is None:
        return False
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()


def complain(sentence: str, folder: Path) -> int:
    print(f"FAILED: {sentence}")
    for log in sorted(folder.glob("*.log")):
        print(f"--- {log}\n{log.read_text(errors='replace')[-3000:]}")
    return 1


# --- A long run


ISLANDS = 4
LIFE = 400
"""Steps after which a run is left and resumed in the same process."""


def steps(folder: Path, count: int, num_kills: int, draw: random.Random) -> int:
    """Trains `count` steps of a toy through lost gradients, joins, NaNs, restarts and kills."""
    __import__("toy")  # in this process, for those it forks

    for name in ("tmp", "here"):
        (folder / name).mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
    os.chdir(folder / "here")
    saves, log = folder / "run" / "checkpoints" / "toy", folder / "soak.log"
    # All kills in the first half: the second shows whether memory is flat.
    for moment in sorted(draw.sample(range(50, count // 2), num_kills)):
        pid = fork(lambda: soak(folder, count), log)
        while completed(saves) < moment:
            if (code := ended(pid)) is not None:
                return complain(f"ended with {code} before step {moment}", folder)
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 1))
        kill(pid)
        print(f"killed after step {completed(saves)}", flush=True)
    pid = fork(lambda: soak(folder, count), log)
    if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        return complain(f"the run ended with {code}", folder)
    print("".join(line for line in log.open() if line.startswith(("step", "left", "Theta", "memory"))), end="")
    left = [str(path) for name in ("tmp", "here") for path in (folder / name).rglob("*")]
    print(f"files left outside the run's folder: {left or 'none'}")
    return int(bool(left))


def soak(folder: Path, count: int) -> None:
    """Trains from the last checkpoint to the end, in lives of `LIFE` steps; fails unless all is as it should be."""
    import jax
    import levanter.tracker
    import numpy as np
    import optax
    from levanter.checkpoint import CheckpointerConfig
    from levanter.tracker.tracker import NoopTracker
    from levanter.utils.mesh import MeshConfig

    from helpers.toy_model import Toy, toy_loss, trainer_config  # pyrefly: ignore[missing-import]  it lies in tests
    from levanter_diloco.training.trainer import DiLoCoTrainer

    phases = [[0, 2]] + [[150 * n, 1 + (7 * n) % ISLANDS] for n in range(1, count // 150 + 1)]
    block = {**STREAMING, "overlap_steps": 2, "error_feedback": True, "wire_block": 4, "ici_islands": ISLANDS}
    block |= {"drop_rate": 0.2, "schedule_islands": phases, "weights": "tokens"}
    keep = CheckpointerConfig(base_path=str(folder / "run" / "checkpoints"), save_interval=None, keep=[{"every": 25}])
    mesh, model = MeshConfig(axes={"data": 1}), Toy.of(np.ones(3), np.ones((2, 4)))
    samples, programs = [], None
    while True:
        options = {"train_batch_size": ISLANDS, "num_train_steps": count, "mesh": mesh, "checkpointer": keep}
        config = trainer_config(folder / "run", block, **options)
        config._validate_and_set_defaults()
        inner = optax.sgd(0.1, momentum=0.5)
        # pyrefly: ignore[bad-argument-type]  the host's protocol of a loss names no arguments
        with levanter.tracker.current_tracker(NoopTracker()), DiLoCoTrainer(config, inner, toy_loss) as trainer:
            state = trainer.initial_state(jax.random.PRNGKey(0), model=model)
            trainer._programs = programs  # of the same options: a life need not compile anew
            start = int(state.step)
            state = trainer.train(state, batches(start, min(start + LIFE, count), trainer.participation.active)).state
            programs = trainer._programs
        samples.append((int(state.step), resident(), len(os.listdir("/proc/self/fd")), len(jax.live_arrays())))
        print("step {}: {:.1f} MiB resident, {} open files, {} arrays".format(*samples[-1]), flush=True)
        if int(state.step) >= count:
            break
    outer = state.model, state.opt_state
    equal = all(
        len({np.asarray(shard.data).tobytes() for shard in x.addressable_shards}) == 1 for x in jax.tree.leaves(outer)
    )
    finite = all(np.isfinite(x).all() for x in jax.tree.leaves(jax.tree.map(np.asarray, outer)))
    print(f"Theta equal on all islands: {equal}, finite: {finite}; outer steps {np.asarray(state.outer_steps)}")
    flat = is_flat(samples)
    print(f"memory flat: {flat}", flush=True)
    sys.exit(0 if equal and finite and flat else 1)


def batches(start: int, stop: int, active: Callable[[int], int]) -> Iterator[dict]:
    """A row for each island and step; now and then one island's is NaN."""
    import numpy as np

    from helpers.toy_model import toy_batch  # pyrefly: ignore[missing-import]  it lies in tests

    for step in range(start, stop):
        rng = np.random.default_rng(step)
        embed = rng.normal(size=(ISLANDS, 3))
        if step % 60 == 17 and active(step) > 1:
            embed[rng.integers(active(step))] = np.nan
        yield toy_batch(embed, rng.normal(size=(ISLANDS, 2, 4)))


def resident() -> float:
    """MiB of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def is_flat(samples: list[tuple[int, float, int, int]]) -> bool:
    """Whether memory, open files and arrays are at the end what they were halfway, but for 3 %."""
    half, last = samples[len(samples) // 2], samples[-1]
    return last[1] < 1.03 * half[1] and last[2] <= half[2] + 2 and last[3] <= half[3] + 2


# --- Properties


def properties(count: int, seed: int) -> int:
    """Runs the property test on `count` examples of its own."""
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    import test_properties  # pyrefly: ignore[missing-import]  it lies in tests
    from hypothesis import given, settings
    from hypothesis import seed as seeded

    @seeded(seed)
    @given(test_properties.runs())
    @settings(max_examples=count, deadline=None, database=None)
    def check(drawn: dict[str, Any]) -> None:
        print(drawn, flush=True)
        test_properties.check(drawn, seed)

    check()
    print(f"{count} examples: none falsified")
    return 0


if __name__ == "__main__":
    sys.exit(main())
