"""Reports of a plan: in words, and as a plot."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...errors import BadInput
from .forecast import Figures, Plan, Setting, methods
from .simulate import required_rate, utilization

PAPERS = "[DiLoCo] arXiv:2311.08105, [Streaming] arXiv:2501.18512, [Scaling] arXiv:2503.09799"

ASSUMPTIONS = (
    "Assumed: a simulation of the schedule; equal inner steps; one link an island, at its full rate, one transfer at",
    "a time, no latency; f32 crosses in a ring, 2 (K-1)/K of the payload, other wires are gathered or scattered; data",
    "parallelism hides behind its backward pass (embedding and head last), a sync behind V steps; the outer step and",
    "wire casts take no time.",
)


def lines(plan: Plan) -> Iterator[str]:
    """The plan in words."""
    size, schedule, rate = plan.parameters, plan.schedule, plan.rate
    yield (
        f"{_si(size.total)} parameters: {size.layers} layers of {_si(size.per_layer)}, "
        f"{_si(size.rest).strip()} outside; {plan.islands} island(s), {plan.step_seconds:g} s a step, "
        + (f"link {_si(rate)}bit/s" if rate else "no --rate given")
    )
    first, *others = plan.fragment_bytes
    yield (
        f"fragments: P={schedule.num_fragments}, one every {schedule.steps_per_sync} step(s), each every "
        f"{schedule.effective_period} (H={schedule.sync_period}); V={schedule.overlap_steps}"
    )
    if plan.partition == "balanced":
        yield f"  0-{len(others)}: equal shares of everything, {_si(first)}B in f32 each"
    elif others:
        yield f"  0: outside the layers, {_si(first)}B in f32"
        yield f"  1-{len(others)}: {size.layers // len(others)} layer(s) each, {_si(others[0])}B in f32"
    else:
        yield f"  0: everything, {_si(first)}B in f32"
    yield f"valid P: {' '.join(map(str, plan.valid_num_fragments))}; any with partition: balanced"
    memory = asdict(plan.memory_added_per_island)
    parts = ", ".join(f"{name.replace('_', ' ')} {_si(value)}B" for name, value in memory.items())
    yield f"memory added per island: {_si(sum(memory.values()))}B ({parts})"
    yield ""
    yield from _table(plan.methods, rate)
    yield ""
    options = asdict(plan.recommended)
    reasons = options.pop("reasons")
    yield f"recommended: trainer.diloco: {_yaml(options)}"
    for reason in reasons:
        yield f"  {reason}"
    yield f"  ({PAPERS})"
    yield ""
    yield from ASSUMPTIONS
    yield from plan.notes


def _table(methods: Sequence[Figures], rate: float | None) -> Iterator[str]:
    targets = list(methods[0].required_rate)
    head = f"{'one sync':20}{'wire':7}{'sends':>9}" + (f"{'takes':>9}{'= steps':>9}{'busy':>8}" if rate else "")
    yield head + "  | bit/s for " + "".join(f"{target:>8}" for target in targets)
    for one in methods:
        line = f"{one.method:20}{one.wire:7}{_si(one.largest_transfer_bytes) + 'B':>9}"
        if rate:
            seconds = one.largest_transfer_seconds or 0
            line += f"{_si(seconds) + 's':>9}{one.largest_transfer_steps:>9.3g}{one.utilization:>8.1%}"
        rates = "".join(f"{_si(one.required_rate[target]).strip():>8}" for target in targets)
        yield f"{line}  | {'':10}{rates}"


def _yaml(options: Mapping[str, Any]) -> str:  # Any: JSON
    """A block in the flow style of YAML, ready to paste."""
    return "{" + ", ".join(f"{k}: {_yaml(v) if isinstance(v, Mapping) else v}" for k, v in options.items()) + "}"


def _si(value: float) -> str:
    """Three digits and a decimal prefix: 10.2 G."""
    for prefix, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0), ("m", 1e-3)):
        if value >= unit or (prefix == "m" and value):
            digits = f"{value / unit:.3g}" if value < 1000 * unit else f"{value / unit:.0f}"
            return f"{digits} {prefix}"
    return "0 "


def draw(setting: Setting, path: str) -> None:
    """Draws the utilization of each method against the link's rate."""
    try:
        # pyrefly: ignore[missing-import]  an optional extra
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BadInput(
            f"--plot ({path}) must have matplotlib to draw with; pip install 'levanter-diloco[plot]' brings it."
        ) from error
    shown = [method for method in methods(setting) if method.work.bits_per_period]
    if not shown:
        raise BadInput(
            f"--plot ({path}) must have something to draw: one island exchanges nothing; --islands 2 works."
        )
    low = min(required_rate(method.work, 0.1) for method in shown)
    high = max(required_rate(method.work, 0.99) for method in shown) * 2
    rates = [low * (high / low) ** (i / 100) for i in range(101)]
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="link of an island, Gbit/s", ylabel="compute utilization")
    for method in shown:
        label = f"{method.name.strip()}, {method.wire}"
        busy = [utilization(method.work, rate) for rate in rates]
        axes.plot([rate / 1e9 for rate in rates], busy, label=label)
    if setting.rate is not None:
        axes.axvline(setting.rate / 1e9, color="gray", linewidth=1)
    axes.legend()
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise BadInput(f"--plot ({path}) must be a file that can be written: {error}; plan.png works.") from error
