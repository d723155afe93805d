"""One process of `levanter-diloco bench`: `train_lm`, timed at one rate of its link after the other.

The processes meet before and after the periods at one rate; in between nothing but the training makes one wait for
the other. Each notes the time after a period's last step and what its interface has sent from meeting to meeting.
"""

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.experimental.multihost_utils import sync_global_devices
from levanter.callbacks import StepInfo
from levanter.callbacks.watch import WatchConfig
from levanter.checkpoint import CheckpointerConfig
from levanter.tracker.tracker import NoopConfig

from ...algorithm.schedule import Schedule
from ...console import end, leave
from ...host.loop import hand_steps_to
from ...main.program import run
from ...main.train_lm import TrainDiLoCoLmConfig
from ...main.train_lm import main as train
from ...network.link import LinkConfig, shaped
from ...network.namespaces import INTERFACE
from ...training.config import DiLoCoTrainerConfig
from .methods import METHODS, OPEN

SENT = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")


@dataclass(frozen=True)
class BenchConfig:
    """What is measured."""

    method: str = "vanilla"
    """A name of `bench.METHODS`."""

    rates: str = OPEN
    """Of the link, in turn, with commas between."""

    periods: int = 1
    """Sync periods at each rate."""

    output: Path = Path(".")
    """The folder of the records."""


@dataclass
class BenchLmConfig(TrainDiLoCoLmConfig):
    """A training YAML and what is measured of it."""

    bench: BenchConfig = field(default_factory=BenchConfig)


def main(config: BenchLmConfig) -> None:
    """Trains until everything is measured, writes this process's record, and ends the process."""
    bench, trainer = config.bench, config.trainer
    settle(trainer, bench)
    diloco = trainer.diloco

    def consume(steps: Iterator[StepInfo]) -> None:
        segments = measure(steps, bench, diloco.schedule)
        options = {n: getattr(diloco, n) for n in ("enabled", "sync_period", "num_fragments", "overlap_steps")}
        record = {**options, "effective_period": diloco.schedule.effective_period, "segments": segments}
        (bench.output / f"{jax.process_index()}.json").write_text(json.dumps(record))
        jax.distributed.shutdown()  # waits for the others
        leave()

    hand_steps_to(consume)
    train(config)


def settle(trainer: DiLoCoTrainerConfig, bench: BenchConfig) -> None:
    """Sets the method, an island for each process, and leaves out all but the training."""
    diloco, processes = trainer.diloco, trainer.distributed.num_processes or 1
    options: dict[str, Any] = {"enabled": True, "ici_islands": processes, "dcn_islands": 1, "link": None}  # Any: YAML
    trainer.diloco = dataclasses.replace(diloco, **(options | METHODS[bench.method](diloco)))
    if not trainer.diloco.enabled:
        # Whole parameters on each process, so that a step exchanges its gradient and no more.
        trainer.mesh = dataclasses.replace(trainer.mesh, axes={**trainer.mesh.axes, "replica": processes})
    trainer.id = bench.method
    trainer.tracker, trainer.watch = NoopConfig(), WatchConfig(interval=0)
    trainer.log_dir, trainer.log_jaxprs, trainer.log_xla_hlo = bench.output / "logs", False, False
    checkpoints = str(bench.output / "checkpoints")
    trainer.checkpointer = CheckpointerConfig(base_path=checkpoints, save_interval=None, keep=None)
    trainer.num_train_steps = trainer.steps_per_eval = 10**6  # never reached
    trainer.require_accelerator = False
    trainer.distributed = dataclasses.replace(trainer.distributed, initialize_jax_distributed=True)


def measure(steps: Iterator[StepInfo], bench: BenchConfig, schedule: Schedule) -> list[dict[str, Any]]:  # Any: JSON
    """Returns seconds and bytes of a step at each rate."""
    period = schedule.effective_period
    # What is compiled is compiled by then: the outer step may come in the period after the capture.
    advance(steps, period if schedule.overlap_steps == 0 else 2 * period)
    segments = []
    for rate in bench.rates.split(","):
        with shaped(None if rate == OPEN else LinkConfig(rate, interface=INTERFACE)):
            sync_global_devices("start")
            sent, moments = int(SENT.read_text()), [time.perf_counter()]
            for _ in range(bench.periods):
                advance(steps, period)
                moments.append(time.perf_counter())
            sync_global_devices("end")  # what is still on its way is sent as slowly
            sent = int(SENT.read_text()) - sent
        seconds = [(end - start) / period for start, end in itertools.pairwise(moments)]
        bytes_per_step = sent / (bench.periods * period)
        segments.append({"rate": rate, "seconds_per_step": seconds, "bytes_per_step": bytes_per_step})
    return segments


def advance(steps: Iterator[StepInfo], count: int) -> None:
    """Trains `count` steps and waits for them."""
    *_, last = itertools.islice(steps, count)
    jax.block_until_ready(last.state)


if __name__ == "__main__":
    end(lambda: run("levanter_diloco.commands.bench.process", sys.argv[1:]))
