"""Report on all programs of a run: compiles each one and audits it."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from humanfriendly import format_size

from ...islands.programs import StepProgram
from ..report import Report
from .aot import AbstractRun
from .audit import Audit, Exchange, Memory

GIB = 2**30

NOTES = (
    "Sent: what the devices of an island hand to exchanges with other islands, padding included, in the program;",
    "by count: the payload that the run's metrics report. Overlapped: the exchange starts before the first loop over",
    "layers and is awaited after the last. FLOPs meanwhile: the least share of the step's matrix products that is",
    "scheduled between an exchange's start and end.",
)


MEMORY = ("arguments", "temporaries", "outputs", "code", "total")
SENT = ("sent", "by count", "exchanges", "overlapped", "FLOPs meanwhile")


@dataclass(frozen=True)
class ProgramReport:
    """One program, compiled. A program that does not fit into a device's memory has an `error` and no audit."""

    name: str
    runs_per_period: int
    trace_seconds: float
    compile_seconds: float
    memory_bytes: Memory | None
    flops: int | None
    sent_bytes: int | None
    """Bytes that the devices of an island hand to exchanges with others, padding included."""

    analytic_bytes: int
    """Bytes that an island sends by count of parameters, as the run's metrics report them."""

    exchanges: tuple[Exchange, ...]
    error: str | None

    @classmethod
    def of(cls, program: StepProgram, analytic_bytes: int, island_size: int) -> "ProgramReport":
        """Compiles `program`, whose islands have `island_size` devices each."""
        started = time.perf_counter()
        lowered = program.trace().lower()
        traced = time.perf_counter()
        audit, error = None, None
        try:
            audit = Audit.of(lowered.compile(), island_size)
        except jax.errors.JaxRuntimeError as refusal:
            # The compiler's only answer for a program that is too big; the other programs are still worth a report.
            if "RESOURCE_EXHAUSTED" not in str(refusal):
                raise
            error = str(refusal).splitlines()[0]
        return cls(
            name=program.name,
            runs_per_period=program.runs,
            trace_seconds=traced - started,
            compile_seconds=time.perf_counter() - traced,
            memory_bytes=audit.memory if audit else None,
            flops=audit.flops if audit else None,
            sent_bytes=audit.sent_bytes if audit else None,
            analytic_bytes=analytic_bytes,
            exchanges=audit.exchanges if audit else (),
            error=error,
        )

    def on_device(self, hbm_bytes: int | None) -> list[str]:
        """Its row in the table of what a device holds."""
        memory = self.memory_bytes
        assert memory is not None  # it compiles
        share = f"{memory.total / hbm_bytes:.1%}" if hbm_bytes else "-"
        figures = [_size(getattr(memory, name)) for name in MEMORY]
        return [self.name, f"{self.runs_per_period} x", f"{self.compile_seconds:.1f} s", *figures, share]

    def between_islands(self) -> list[str]:
        """Its row in the table of what crosses between islands."""
        kinds = sorted(Counter(one.kind for one in self.exchanges).items())
        row = [self.name, _size(self.sent_bytes or 0), _size(self.analytic_bytes)]
        row.append(", ".join(f"{count} {kind}" for kind, count in kinds))
        shares = [one.flops_meanwhile for one in self.exchanges if one.flops_meanwhile is not None]
        if not shares:  # on CPUs no exchange has its place in a schedule
            return [*row, "-", "-"]
        overlapped = sum(bool(one.overlapped) for one in self.exchanges)
        return [*row, f"{overlapped} of {len(self.exchanges)}", f"{min(shares):.0%}"]


@dataclass(frozen=True)
class CompileReport(Report):
    """All programs of a run on slices that are not here."""

    topology: str
    num_slices: int
    devices: int
    islands: int
    hbm_bytes: int | None
    sync_period: int
    effective_period: int
    num_fragments: int
    overlap_steps: int
    wire: str
    programs: tuple[ProgramReport, ...]
    sent_bytes_per_period: int
    analytic_bytes_per_period: int

    @classmethod
    def of(cls, run: AbstractRun, topology: str, num_slices: int, hbm_gib: float | None) -> "CompileReport":
        """Compiles every program of `run`.

        Args:
            run: The run, within its context.
            topology: The name of a slice, for the report.
            num_slices: Slices, for the report.
            hbm_gib: Memory of a device that programs may use; None where it is not known.
        """
        config, schedule = run.trainer.config, run.trainer.schedule
        island_size = config.device_mesh.size // config.islands.num_slots
        programs = tuple(ProgramReport.of(one, _payload(one, run), island_size) for one in run.programs)
        return cls(
            topology=topology,
            num_slices=num_slices,
            devices=config.device_mesh.size,
            islands=config.islands.num_islands,
            hbm_bytes=int(hbm_gib * GIB) if hbm_gib else None,
            sync_period=schedule.sync_period,
            effective_period=schedule.effective_period,
            num_fragments=schedule.num_fragments,
            overlap_steps=schedule.overlap_steps,
            wire=config.diloco.wire,
            programs=programs,
            sent_bytes_per_period=sum(one.runs_per_period * (one.sent_bytes or 0) for one in programs),
            analytic_bytes_per_period=sum(run.traffic.of_sync(f) for f in range(schedule.num_fragments)),
        )

    @property
    def too_big(self) -> bool:
        """Whether a program does not fit into its device."""
        return any(one.error for one in self.programs)

    def lines(self) -> Iterator[str]:
        yield (
            f"{self.num_slices} x {self.topology}: {self.islands} island(s), {self.devices} devices; "
            f"each fragment every {self.effective_period} steps, P={self.num_fragments}, V={self.overlap_steps}"
        )
        yield ""
        fitting = [one for one in self.programs if not one.error]
        rows = [one.on_device(self.hbm_bytes) for one in fitting]
        yield from _table([["on one device", "a period", "compile", *MEMORY, "of HBM"], *rows])
        yield ""
        rows = [one.between_islands() for one in fitting if one.exchanges]
        yield from _table([["between islands", *SENT], *rows])
        sent, analytic = _size(self.sent_bytes_per_period), _size(self.analytic_bytes_per_period)
        yield f"an island sends {sent} a period, by count of parameters {analytic}"
        for one in self.programs:
            if one.error:
                yield f"{one.name} does not compile: {one.error}"
        yield ""
        yield from NOTES


def _payload(program: StepProgram, run: AbstractRun) -> int:
    """Bytes that an island sends in `program` by count of parameters."""
    crossing = program.crossing
    return 0 if crossing is None else run.traffic.of_sync(crossing.fragment) // run.trainer.schedule.num_pieces


def _table(rows: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        yield "  ".join(cells)


def _size(count: int) -> str:
    return format_size(count, binary=True)
