"""`levanter-diloco inspect`: what a checkpoint holds, and whether it is whole."""

import json
from typing import Any

from ..console import show
from ..errors import OptionError
from ..options.plugins import load_plugins
from .flags import Parser


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
        report = report_of(latest(flags.checkpoint))
    except OptionError as error:
        parser.error(str(error))
    show(json.dumps(report, indent=2) if flags.json else "\n".join(lines(report)))


def report_of(path: str) -> dict[str, Any]:
    """All that is known of the checkpoint at `path`, as JSON.

    Raises:
        DamagedCheckpoint: If it is damaged.
    """
    from ..algorithm.schedule import Schedule
    from ..checkpoint.codec import stored_facts
    from ..checkpoint.integrity import CHECKSUMS, check, checksum_of, read_array, stored_arrays
    from ..checkpoint.label import Label

    checksums, arrays, label = check(path), stored_arrays(path), Label.read(path)
    facts = stored_facts(path)
    facts = {name: facts[name] for name in ("islands", *_SCHEDULE)}
    schedule = Schedule(*(facts[name] for name in _SCHEDULE))
    step, settled = int(read_array(path, "step")), int(read_array(path, "settled"))
    parts: dict[str, dict[str, Any]] = {}
    for name in arrays.keys() - {CHECKSUMS}:
        part = name.partition("/")[0]
        size = parts.setdefault(part, {"arrays": 0, "bytes": 0, "checksum": None})
        size["arrays"] += 1
        size["bytes"] += _nbytes(arrays[name].shape, arrays[name].dtype)
        size["checksum"] = checksum_of(checksums, part) if checksums else None
    return {
        "path": path,
        "step": step,
        **facts,
        "effective_period": schedule.effective_period,
        "wire": label.diloco["wire"] if label is not None else None,
        "partition": label.diloco["partition"] if label is not None else None,
        "model": label.model if label is not None else None,
        "in_flight": [
            {"fragment": fragment, "captured": capture, "merges": capture + schedule.overlap_steps}
            for capture, fragment in schedule.unmerged(step, settled)
        ],
        "outer_steps": read_array(path, "outer_steps").tolist(),
        "parts": parts,
        "whole": True if checksums else None,
    }


_SCHEDULE = ("sync_period", "num_fragments", "overlap_steps")
"""The facts that `Schedule` takes, in its order."""


def lines(report: dict[str, Any]) -> list[str]:
    """The report in words."""
    parts, kind, format = report["parts"], "", ""
    if report["wire"] is not None:
        format = f", {report['partition']}, wire {report['wire']}"
        kind = f" of a {report['model']['type']} model" if report["model"] else ""
    flights = [
        f"fragment {one['fragment']}, captured after step {one['captured']}, merges after step {one['merges']}"
        for one in report["in_flight"]
    ]
    whole = f"all {sum(part['arrays'] for part in parts.values())} arrays are as they were saved"
    total = sum(part["bytes"] for part in parts.values())
    rows = [
        f"  {name:<14}{part['arrays']:>7} {_size(part['bytes']):>12}  {part['checksum'] or ''}".rstrip()
        for name, part in sorted(parts.items(), key=lambda item: -item[1]["bytes"])
    ]
    return [
        f"{report['path']}: {report['step']} steps{kind}",
        f"islands      K={report['islands']}",
        f"schedule     H={report['sync_period']} ({report['effective_period']} in effect), "
        f"P={report['num_fragments']}, V={report['overlap_steps']}{format}",
        f"in flight    {'; '.join(flights) or 'nothing'}",
        f"outer steps  {' '.join(map(str, report['outer_steps']))} (of fragment 0, 1, ...)",
        f"whole        {whole if report['whole'] else 'not known: it was saved without checksums'}",
        "",
        f"  {'part':<14}{'arrays':>7} {'bytes':>12}  checksum",
        *rows,
        f"  {'all':<14}{'':>7} {_size(total):>12}",
    ]


def _size(nbytes: int) -> str:
    import humanfriendly

    return humanfriendly.format_size(nbytes, binary=True)


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    import math

    import jax.numpy as jnp

    return math.prod(shape) * jnp.dtype(dtype).itemsize
