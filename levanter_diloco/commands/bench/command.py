"""`levanter-diloco bench`: what a slow link costs, measured in training steps between processes of this machine.

Each method is one launch of `main/bench_lm.py` in `--processes` processes, an island each, whose networks are apart
(`namespaces.py`). After a warm-up of whole sync periods on the open link they train `--periods` whole periods at each
rate in turn; see there how a period is timed and its bytes are counted. Needs no device, jax or the host itself.
"""

import argparse
import json
import os
import re
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from humanfriendly import format_size

from ...errors import BadInput
from ...network.link import RATE_UNITS, quantity
from ...network.namespaces import address, obstacle, run_apart
from ..flags import Parser, count
from ..plan.command import load
from ..report import Report
from .methods import METHODS, OPEN

NOTE = (
    "x none: against the same method on a link that is not shaped. sent/step: by an island, counted at its interface\n"
    "with headers. XLA on CPUs runs a collective and the computation around it one after the other, so overlap_steps\n"
    "gains nothing here; on TPUs it hides the exchange."
)

_Record = Mapping[str, Any]  # Any: JSON


def main(args: list[str]) -> None:
    """Measures what `args` ask for and prints a table; exits with 2 and one line where that cannot be."""
    parser = _parser()
    flags, more = parser.parse_known_args(args)
    try:
        methods = flags.methods or _methods(load(flags.config_path), more)
    except BadInput as error:
        parser.error(str(error))
    if reason := obstacle("tc"):
        parser.error(f"bench makes a network for each process, and cannot here: {reason}.")
    for number in (signal.SIGINT, signal.SIGTERM):  # so that nothing is left behind
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="levanter-diloco-bench-") as folder:
        for method in methods:
            print(f"levanter-diloco: {method}: training {flags.processes} processes", file=sys.stderr)
            rows += rows_of(method, _run(flags, more, method, Path(folder, method)))
    BenchReport(tuple(rows)).show(flags.json)


def _parser() -> Parser:
    parser = Parser(
        prog="levanter-diloco bench",
        description="Seconds and bytes of a training step over a slow link, between processes on the CPUs here. "
        "Linux, as root.",
        epilog="Other flags, such as --trainer.seed 1, override the YAML. Its data must lie on this machine.",
        allow_abbrev=False,
    )
    names = ",".join(METHODS)
    parser.add_argument("--config_path", required=True, metavar="run.yaml", help="training YAML")
    parser.add_argument("--rates", type=_rates, default="none,1gbit,200mbit,50mbit", help="of an island (%(default)s)")
    parser.add_argument("--processes", type=count, default=2, help="islands, a process and a CPU device each (2)")
    parser.add_argument("--periods", type=count, default=3, help="sync periods at each rate, of which the median (3)")
    parser.add_argument("--methods", type=_known_methods, help=f"of {names}; by default those that the YAML allows")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    return parser


def _rates(text: str) -> list[str]:
    for rate in text.split(","):
        if rate != OPEN and not quantity(rate, RATE_UNITS) >= 8e3:
            rule = f"must be {OPEN} or at least 8kbit, in {' '.join(RATE_UNITS)} a second"
            raise argparse.ArgumentTypeError(f"({rate}) {rule}; {OPEN},50mbit works.")
    return text.split(",")


def _known_methods(text: str) -> list[str]:
    if unknown := [name for name in text.split(",") if name not in METHODS]:
        raise argparse.ArgumentTypeError(f"({unknown[0]}) must be of {','.join(METHODS)}; vanilla,streaming works.")
    return text.split(",")


def _methods(config: Mapping[str, Any], more: Sequence[str]) -> list[str]:  # Any: a YAML
    """All methods, but those that need fragments where there is one."""
    flag = re.search(r"--trainer\.diloco\.num_fragments[ =](\S+)", " ".join(more))
    diloco = (config.get("trainer") or {}).get("diloco") or {}
    streams = str(flag[1] if flag else diloco.get("num_fragments", 1)) != "1"
    return [method for method in METHODS if streams or method != "streaming"]


def _run(flags: argparse.Namespace, more: Sequence[str], method: str, output: Path) -> list[_Record]:
    """Trains with one method; returns the record of each process."""
    output.mkdir()
    own = {
        "bench.method": method,
        "bench.rates": ",".join(flags.rates),
        "bench.periods": flags.periods,
        "bench.output": output,
        "trainer.distributed.coordinator_address": f"{address(0)}:5077",
        "trainer.distributed.num_processes": flags.processes,
    }
    words = [word for option, value in own.items() for word in (f"--{option}", str(value))]
    train = [
        sys.executable,
        "-m",
        "levanter_diloco.commands.bench.process",
        "--config_path",
        flags.config_path,
        *more,
        *words,
    ]
    commands = [[*train, "--trainer.distributed.process_id", str(process)] for process in range(flags.processes)]
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(output.parent / "xla"),
        **os.environ,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
    log = output / "log.txt"
    with log.open("a") as stream:
        code = run_apart(commands, environment, stream)
    if code != 0:
        _report_failure(method, code, log.read_text(errors="replace").splitlines())
    return [json.loads((output / f"{process}.json").read_text()) for process in range(flags.processes)]


def _report_failure(method: str, code: int, log: list[str]) -> NoReturn:
    refused = [line for line in log if line.startswith("levanter-diloco: ")][:1] if code == 2 else []
    said = refused or [*log[-30:], f"levanter-diloco: {method} ended with status {code}"]
    print("\n".join(said), file=sys.stderr)
    sys.exit(code if refused else 1)


@dataclass(frozen=True)
class Row:
    """One method at one rate."""

    method: str
    enabled: bool
    """Whether islands train; else it is data parallelism, and has no schedule."""

    sync_period: int
    """H, as asked for."""

    effective_period: int
    num_fragments: int
    overlap_steps: int
    rate: str
    seconds_per_step: float
    bytes_per_step: float
    times_unshaped: float | None
    """Its seconds over those of the same method on a link that is not shaped."""


@dataclass(frozen=True)
class BenchReport(Report):
    """All that was measured."""

    rows: tuple[Row, ...]
    note: str = NOTE

    def lines(self) -> Iterator[str]:
        yield f"{'method':16}{'H':>5}{'P':>4}{'V':>4}{'link':>10}{'s/step':>10}{'x none':>9}{'sent/step':>12}"
        for row in self.rows:
            schedule = row.effective_period, row.num_fragments, row.overlap_steps
            period, fragments, overlap = schedule if row.enabled else ("", "", "")
            ratio = "" if row.times_unshaped is None else f"{row.times_unshaped:.2f}"
            yield (
                f"{row.method:16}{period:>5}{fragments:>4}{overlap:>4}{row.rate:>10}"
                f"{row.seconds_per_step:>10.3f}{ratio:>9}{format_size(row.bytes_per_step):>12}"
            )
        yield self.note


def rows_of(method: str, records: Sequence[_Record]) -> Iterator[Row]:
    """A row for each rate: the slowest process of each period, the median of the periods, the most bytes."""
    about = {name: value for name, value in records[0].items() if name != "segments"}
    measured: list[tuple[str, float, float]] = []
    for segments in zip(*(record["segments"] for record in records), strict=True):
        periods = zip(*(segment["seconds_per_step"] for segment in segments), strict=True)
        seconds = statistics.median(map(max, periods))
        measured.append((segments[0]["rate"], seconds, max(segment["bytes_per_step"] for segment in segments)))
    unshaped = next((seconds for rate, seconds, _ in measured if rate == OPEN), None)
    for rate, seconds, sent in measured:
        ratio = seconds / unshaped if unshaped else None
        yield Row(method, **about, rate=rate, seconds_per_step=seconds, bytes_per_step=sent, times_unshaped=ratio)
