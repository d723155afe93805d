"""`levanter-diloco inspect`: what a checkpoint holds, and whether it is whole."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from humanfriendly import format_size

from ..errors import OptionError
from ..options.plugins import load_plugins
from .flags import Parser
from .report import Report


def main(args: list[str]) -> None:
    """Prints what `args` ask for; exits with 2 and one line on bad input or a damaged checkpoint."""
    parser = Parser(
        prog="levanter-diloco inspect",
        usage="%(prog)s D [--json]",
        description="Reads all of a DiLoCo checkpoint, compares it with its checksums and prints its step, its "
        "schedule, what is in flight, and sizes. Needs no YAML and no accelerator.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="D", help="a step-N, or a folder of them: the latest")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    flags = parser.parse_args(args)
    try:
        load_plugins()
        # Only now: --help answers at once, the host takes 15 seconds to import.
        import jax

        from ..checkpoint.recovery import latest

        jax.config.update("jax_platforms", "cpu")
        report = CheckpointReport.of(latest(flags.checkpoint))
    except OptionError as error:
        parser.error(str(error))
    report.show(flags.json)


@dataclass(frozen=True)
class InFlight:
    """A captured fragment that is not merged yet."""

    fragment: int
    captured: int
    """After this step."""

    merges: int
    """After this step."""


@dataclass(frozen=True)
class Part:
    """The arrays of one part of a checkpoint, such as `model`."""

    arrays: int
    bytes: int
    checksum: str | None


@dataclass(frozen=True)
class CheckpointReport(Report):
    """All that is known of a checkpoint."""

    path: str
    step: int
    islands: int
    sync_period: int
    num_fragments: int
    overlap_steps: int
    effective_period: int
    wire: str | None
    partition: str | None
    model: Mapping[str, Any] | None  # Any: a block of YAML
    in_flight: tuple[InFlight, ...]
    outer_steps: tuple[int, ...]
    parts: Mapping[str, Part]
    whole: bool | None
    """Whether all arrays are as they were saved; None where none has a checksum."""

    @classmethod
    def of(cls, path: str) -> "CheckpointReport":
        """Reads all of the checkpoint at `path`.

        Raises:
            DamagedCheckpoint: If it is damaged.
        """
        # Here: --help does without the host.
        from ..algorithm.schedule import Schedule
        from ..checkpoint.codec import stored_facts
        from ..checkpoint.integrity import CHECKSUMS, check, checksum_of, read_array, stored_arrays
        from ..checkpoint.label import Label

        checksums, label, facts = check(path), Label.read(path), stored_facts(path)
        schedule = Schedule(facts["sync_period"], facts["num_fragments"], facts["overlap_steps"])
        step, settled = int(read_array(path, "step")), int(read_array(path, "settled"))
        by_part: dict[str, list[int]] = {}
        for name, array in stored_arrays(path).items():
            if name != CHECKSUMS:
                by_part.setdefault(name.partition("/")[0], []).append(_nbytes(array.shape, array.dtype))
        unmerged = schedule.unmerged(step, settled)
        return cls(
            path=path,
            step=step,
            islands=facts["islands"],
            sync_period=schedule.sync_period,
            num_fragments=schedule.num_fragments,
            overlap_steps=schedule.overlap_steps,
            effective_period=schedule.effective_period,
            wire=label.diloco["wire"] if label else None,
            partition=label.diloco["partition"] if label else None,
            model=label.model if label else None,
            in_flight=tuple(InFlight(f, capture, capture + schedule.overlap_steps) for capture, f in unmerged),
            outer_steps=tuple(read_array(path, "outer_steps").tolist()),
            parts={
                name: Part(len(sizes), sum(sizes), checksum_of(checksums, name) if checksums else None)
                for name, sizes in by_part.items()
            },
            whole=True if checksums else None,
        )

    def lines(self) -> Iterator[str]:
        arrays, total = (sum(getattr(part, name) for part in self.parts.values()) for name in ("arrays", "bytes"))
        flights = [
            f"fragment {one.fragment}, captured after step {one.captured}, merges after step {one.merges}"
            for one in self.in_flight
        ]
        kind = f" of a {self.model['type']} model" if self.model else ""
        format = f", {self.partition}, wire {self.wire}" if self.wire else ""
        whole = f"all {arrays} arrays are as they were saved"
        yield f"{self.path}: {self.step} steps{kind}"
        yield f"islands      K={self.islands}"
        yield (
            f"schedule     H={self.sync_period} ({self.effective_period} in effect), P={self.num_fragments}, "
            f"V={self.overlap_steps}{format}"
        )
        yield f"in flight    {'; '.join(flights) or 'nothing'}"
        yield f"outer steps  {' '.join(map(str, self.outer_steps))} (of fragment 0, 1, ...)"
        yield f"whole        {whole if self.whole else 'not known: it was saved without checksums'}"
        yield ""
        yield f"  {'part':<14}{'arrays':>7} {'bytes':>12}  checksum"
        for name, part in sorted(self.parts.items(), key=lambda item: -item[1].bytes):
            yield f"  {name:<14}{part.arrays:>7} {_size(part.bytes):>12}  {part.checksum or ''}".rstrip()
        yield f"  {'all':<14}{'':>7} {_size(total):>12}"


def _size(nbytes: int) -> str:
    return format_size(nbytes, binary=True)


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    import jax.numpy as jnp

    return math.prod(shape) * jnp.dtype(dtype).itemsize
