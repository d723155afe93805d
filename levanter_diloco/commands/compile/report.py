"""Compiles all programs of a run and reports on them: as figures, and in words."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import jax
from humanfriendly import format_size

from ...islands.programs import StepProgram
from .aot import Abroad
from .audit import Audit

GIB = 2**30

NOTES = (
    "Sent: what the devices of an island hand to exchanges with other islands, padding included, in the program;",
    "by count: the payload that the run's metrics report. Overlapped: the exchange starts before the first loop over",
    "layers and is awaited after the last. FLOPs meanwhile: the least share of the step's matrix products that is",
    "scheduled between an exchange's start and end.",
)


def report_of(run: Abroad, topology: str, num_slices: int, hbm_gib: float | None) -> dict[str, Any]:  # Any: JSON
    """Compiles every program of `run`, and returns all figures.

    Args:
        run: The run, within its context.
        topology: The name of a slice, for the report.
        num_slices: Slices, for the report.
        hbm_gib: Memory of a device that programs may use; None where it is not known.
    """
    config, schedule = run.trainer.config, run.trainer.schedule
    island_size = config.device_mesh.size // config.islands.num_slots
    programs = [_program(program, _payload(program, run), island_size) for program in run.programs]
    return {
        "topology": topology,
        "num_slices": num_slices,
        "devices": config.device_mesh.size,
        "islands": config.islands.num_islands,
        "hbm_bytes": hbm_gib and int(hbm_gib * GIB),
        "sync_period": schedule.effective_period,
        "num_fragments": schedule.num_fragments,
        "overlap_steps": schedule.overlap_steps,
        "programs": programs,
        "sent_bytes_per_period": sum(one["runs_per_period"] * (one["sent_bytes"] or 0) for one in programs),
        "analytic_bytes_per_period": sum(run.traffic.of_sync(f) for f in range(schedule.num_fragments)),
    }


def _payload(program: StepProgram, run: Abroad) -> int:
    """Bytes that an island sends in `program` by count of parameters."""
    crossing = program.crossing
    return 0 if crossing is None else run.traffic.of_sync(crossing.fragment) // run.trainer.schedule.num_pieces


def _program(program: StepProgram, analytic: int, island_size: int) -> dict[str, Any]:  # Any: JSON
    started = time.perf_counter()
    lowered = program.trace().lower()
    traced = time.perf_counter()
    audit, error = None, None
    try:
        audit = Audit.of(lowered.compile(), island_size)
    except jax.errors.JaxRuntimeError as refusal:
        if "RESOURCE_EXHAUSTED" not in str(refusal):
            raise
        error = str(refusal).splitlines()[0]
    memory = audit and {**asdict(audit.memory), "total": audit.memory.total}
    return {
        "name": program.name,
        "runs_per_period": program.runs,
        "trace_seconds": traced - started,
        "compile_seconds": time.perf_counter() - traced,
        "memory_bytes": memory,
        "flops": audit and audit.flops,
        "sent_bytes": audit and audit.sent,
        "analytic_bytes": analytic,
        "exchanges": [asdict(exchange) for exchange in audit.exchanges] if audit else [],
        "error": error,
    }


def lines(report: Mapping[str, Any]) -> Iterator[str]:  # Any: JSON
    """The report in words."""
    hbm, programs = report["hbm_bytes"], report["programs"]
    yield (
        f"{report['num_slices']} x {report['topology']}: {report['islands']} island(s), {report['devices']} devices; "
        f"each fragment every {report['sync_period']} steps, P={report['num_fragments']}, V={report['overlap_steps']}"
    )
    yield ""
    fitting = [program for program in programs if not program["error"]]
    yield from _table(
        [["on one device", "a period", "compile", *MEMORY, "of HBM"], *(_on_device(p, hbm) for p in fitting)]
    )
    yield ""
    yield from _table(
        [["between islands", *SENT], *(_between(program) for program in fitting if program["exchanges"])]
    )
    sent, analytic = report["sent_bytes_per_period"], report["analytic_bytes_per_period"]
    yield f"an island sends {_size(sent)} a period, by count of parameters {_size(analytic)}"
    for program in programs:
        if program["error"]:
            yield f"{program['name']} does not compile: {program['error']}"
    yield ""
    yield from NOTES


MEMORY = ("arguments", "temporaries", "outputs", "code", "total")
SENT = ("sent", "by count", "exchanges", "overlapped", "FLOPs meanwhile")


def _on_device(program: Mapping[str, Any], hbm: int | None) -> list[str]:  # Any: JSON
    memory = program["memory_bytes"]
    share = f"{memory['total'] / hbm:.1%}" if hbm else "-"
    figures = [_size(memory[name]) for name in MEMORY]
    return [program["name"], f"{program['runs_per_period']} x", f"{program['compile_seconds']:.1f} s", *figures, share]


def _between(program: Mapping[str, Any]) -> list[str]:  # Any: JSON
    exchanges = program["exchanges"]
    kinds = sorted(Counter(one["kind"] for one in exchanges).items())
    row = [program["name"], _size(program["sent_bytes"]), _size(program["analytic_bytes"])]
    row.append(", ".join(f"{count} {kind}" for kind, count in kinds))
    if exchanges[0]["overlapped"] is None:
        return [*row, "-", "-"]
    overlapped = sum(bool(one["overlapped"]) for one in exchanges)
    return [*row, f"{overlapped} of {len(exchanges)}", f"{min(one['flops_meanwhile'] for one in exchanges):.0%}"]


def _table(rows: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        yield "  ".join(cells)


def _size(count: int) -> str:
    return format_size(count, binary=True)
