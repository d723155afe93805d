"""What each way to train would make of a slow link: traffic, utilization, the rate it needs, and what we recommend.

Figures come from `simulate`, over the schedule that the package runs. Besides what that module assumes:
- An exchange in f32 is a ring: an island's link carries `2 * (K - 1) / K` of the payload, once for all of its hosts.
  For other wires see `carried_bits`.
- Data parallelism sends a gradient in the parameter dtype every step, each layer as soon as its backward pass is
  done, and what lies outside the stack at the end of the step.
- A wire format costs its bits and those of its scales, no padding.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...algorithm.schedule import Schedule
from ...algorithm.wire import is_lossless, wire_block_bytes, wire_names
from .model_size import ModelSize
from .simulate import Piece, Workload, during_backward, required_rate, utilization

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)

ENOUGH = 0.95
"""The utilization that a recommended sync period reaches, if any does."""

F32 = "f32"
F32_BYTES = 4


@dataclass(frozen=True)
class Setting:
    """What a forecast is made for."""

    size: ModelSize
    num_islands: int
    step_seconds: float
    rate: float | None
    """bit/s of an island's link; None if only the rates needed are asked for."""

    schedule: Schedule
    gradient_bits: int
    """Of one parameter's gradient in data-parallel training."""

    wire_block: int = 256
    """Elements that share a scale on the wire."""

    balanced: bool = False
    """Whether fragments are equal shares of everything (`partition: balanced`), not of the layers."""


@dataclass(frozen=True)
class Method:
    """One way to train."""

    name: str
    wire: str
    work: Workload


def valid_num_fragments(num_layers: int) -> list[int]:
    """Every P that the layer partition takes: 1, and 1 more than each divisor of the layer count."""
    return [1, *(n + 1 for n in range(1, num_layers + 1) if num_layers % n == 0)]


def fragment_params(size: ModelSize, num_fragments: int, balanced: bool = False) -> list[float]:
    """Parameters of each fragment: fragment 0 is the rest, the others are equal shares of the layers; or all equal."""
    if num_fragments == 1 or balanced:
        return [size.total / num_fragments] * num_fragments
    share = size.num_layers * size.per_layer / (num_fragments - 1)
    return [size.rest, *[share] * (num_fragments - 1)]


def methods(setting: Setting) -> list[Method]:
    """Data parallelism, DiLoCo, streaming and streaming with overlap, the last on every wire format."""
    asked = setting.schedule
    num_fragments = asked.num_fragments
    if num_fragments == 1:
        num_fragments = recommended_num_fragments(setting.size.num_layers, asked.sync_period)
    vanilla = Schedule(asked.sync_period, 1, 0)
    streaming = dataclasses.replace(asked, num_fragments=num_fragments, overlap_steps=0)
    longest = streaming.effective_period - 1
    overlapped = dataclasses.replace(streaming, overlap_steps=min(max(asked.overlap_steps, 1), longest))
    found = [
        Method("data parallel", f"{setting.gradient_bits} bit", data_parallel(setting)),
        Method(f"DiLoCo H={vanilla.sync_period}", F32, diloco(setting, vanilla, F32)),
        Method(f"streaming P={num_fragments}", F32, diloco(setting, streaming, F32)),
    ]
    hidden = overlapped.overlap_steps
    for wire in wire_names() if hidden else ():
        found.append(Method(f"  + overlap V={hidden}", wire, diloco(setting, overlapped, wire)))
    return found


def diloco(setting: Setting, schedule: Schedule, wire: str) -> Workload:
    """Every `steps_per_sync` steps one fragment crosses, from the end of the step that captured it."""
    bits = carried_bits(wire, setting.wire_block, setting.num_islands)
    sizes = fragment_params(setting.size, schedule.num_fragments, setting.balanced)
    return Workload(schedule, tuple((Piece(bits * size),) for size in sizes), setting.step_seconds)


def data_parallel(setting: Setting) -> Workload:
    """Every step the whole gradient crosses, behind what is left of the backward pass."""
    size, bits = setting.size, setting.gradient_bits * ring_factor(setting.num_islands)
    layers = during_backward(bits * size.per_layer, range(size.num_layers), size.num_layers, setting.step_seconds)
    return Workload(Schedule(1, 1, 0), ((*layers, Piece(bits * size.rest)),), setting.step_seconds)


def ring_factor(num_islands: int) -> float:
    """What an island's link carries, each way, for one unit of payload in a ring all-reduce."""
    return 2 * (num_islands - 1) / num_islands


def carried_bits(wire: str, block: int, num_islands: int) -> float:
    """What an island's link carries, each way, for one parameter of an outer gradient.

    A lossless format is a ring all-reduce. Of others every island gathers all payloads; or, where that is less, each
    adds up a share and the f32 means are gathered.

    Args:
        wire: Name of the format.
        block: Elements that share a scale.
        num_islands: K.
    """
    bits, others = 8 * wire_block_bytes(wire, block) / block, num_islands - 1
    if is_lossless(wire):
        return bits * ring_factor(num_islands)
    return min(others * bits, others / num_islands * (bits + 8 * F32_BYTES))


def recommended_num_fragments(num_layers: int, sync_period: int) -> int:
    """The valid P nearest to three layers a fragment, of those that can sync once in a period [Streaming]."""
    # More fragments than steps in a period would lengthen the period.
    fits = [p for p in valid_num_fragments(num_layers)[1:] if p <= sync_period] or [1]
    return min(fits, key=lambda p: (abs(num_layers / max(p - 1, 1) - 3), -p))


def outer_learning_rate(num_islands: int, params: float) -> float:
    """The best outer learning rate for a number of islands, of the sizes and islands that [Scaling] tried."""
    row = min(num_islands.bit_length() - 1, 3)  # tried: 1, 2, 4, 8 islands
    return ((0.4, 0.6, 0.6, 0.8) if params >= 335e6 else (0.6, 0.6, 0.8, 1.0))[row]


@dataclass(frozen=True)
class Recommendation:
    """The options that we would start from."""

    sync_period: int
    num_fragments: int
    overlap_steps: int
    mixing_alpha: float
    outer: Mapping[str, str | float]
    """The block `trainer.diloco.outer`."""

    reasons: tuple[str, ...]
    """A sentence for each, with its paper."""


def recommend(setting: Setting) -> Recommendation:
    """The options that we would start from, each with its reason."""
    islands, size = setting.num_islands, setting.size
    rate = outer_learning_rate(islands, size.total)
    beyond = "" if islands in (1, 2, 4, 8) else ", which tried 1, 2, 4 and 8"
    eta = (
        f"outer learning rate {rate}: best for {islands} island(s) at this size [Scaling]{beyond}; "
        "momentum 0.9 [DiLoCo]"
    )
    outer = {"type": "nesterov", "learning_rate": rate, "momentum": 0.9}
    if islands == 1:
        return Recommendation(30, 1, 0, 0.0, outer, ("H=30, P=1, V=0: one island exchanges nothing [Scaling]", eta))
    period, why = _recommended_period(setting)
    num_fragments = recommended_num_fragments(size.num_layers, period)
    reasons = (
        why,
        f"P={num_fragments}: about 3 layers a fragment, {size.num_layers} / {num_fragments - 1} here [Streaming]",
        "V=1, alpha=0.5: overlap costs no quality below 5 steps [Streaming]",
        eta,
    )
    return Recommendation(period, num_fragments, 1, 0.5, outer, reasons)


def _recommended_period(setting: Setting) -> tuple[int, str]:
    """The shortest H of the papers that keeps the islands busy on the f32 wire."""
    if setting.rate is None:
        return 100, "H=100: [Streaming]'s own; a --rate makes this depend on the link"
    papers = {30: "[Scaling]", 100: "[Streaming]", 500: "[DiLoCo]"}
    busy = 0.0
    for period, paper in papers.items():
        schedule = Schedule(period, recommended_num_fragments(setting.size.num_layers, period), 1)
        busy = utilization(diloco(setting, schedule, F32), setting.rate)
        if busy >= ENOUGH:
            return period, f"H={period} {paper}: the shortest of 30, 100, 500 with {ENOUGH:.0%} utilization or more"
    return 500, f"H=500 [DiLoCo]: the longest; this link still leaves {busy:.1%} utilization in f32"


@dataclass(frozen=True)
class Parameters:
    """Trainable parameters."""

    total: float
    layers: int
    per_layer: float
    rest: float


@dataclass(frozen=True)
class Cadence:
    """The schedule, as asked for and in effect."""

    sync_period: int
    """H, as asked for."""

    num_fragments: int
    overlap_steps: int
    steps_per_sync: int
    effective_period: int


@dataclass(frozen=True)
class Figures:
    """What one method makes of the link; times and utilization only where a rate is given."""

    method: str
    wire: str
    largest_transfer_bytes: float
    bytes_per_step: float
    required_rate: Mapping[str, float]
    """bit/s by the utilization that they give."""

    largest_transfer_seconds: float | None = None
    largest_transfer_steps: float | None = None
    utilization: float | None = None


@dataclass(frozen=True)
class AddedMemory:
    """Bytes that DiLoCo adds to an island."""

    outer_parameters: float
    outer_momentum: float
    captured_with_overlap: float


@dataclass(frozen=True)
class Plan:
    """All figures. Bytes are payloads on the f32 wire, rates bit/s, times seconds."""

    parameters: Parameters
    islands: int
    step_seconds: float
    rate: float | None
    schedule: Cadence
    fragment_bytes: tuple[float, ...]
    partition: str
    valid_num_fragments: tuple[int, ...]
    methods: tuple[Figures, ...]
    memory_added_per_island: AddedMemory
    recommended: Recommendation
    notes: tuple[str, ...] = ()
    """What was taken for granted."""


def forecast(setting: Setting, notes: Sequence[str] = ()) -> Plan:
    """Works out the plan of a setting."""
    size, schedule = setting.size, setting.schedule
    sizes = fragment_params(size, schedule.num_fragments, setting.balanced)
    planned = methods(setting)
    kept = fragment_params(size, planned[-1].work.schedule.num_fragments, setting.balanced)
    kept = kept[: 1 if setting.balanced else 2]  # one of each part: of the rest, and of the layers
    asked = (schedule.sync_period, schedule.num_fragments, schedule.overlap_steps)
    return Plan(
        parameters=Parameters(size.total, size.num_layers, size.per_layer, size.rest),
        islands=setting.num_islands,
        step_seconds=setting.step_seconds,
        rate=setting.rate,
        schedule=Cadence(*asked, schedule.steps_per_sync, schedule.effective_period),
        fragment_bytes=tuple(count * F32_BYTES for count in sizes),
        partition="balanced" if setting.balanced else "layers",
        valid_num_fragments=tuple(valid_num_fragments(size.num_layers)),
        methods=tuple(_figures(method, setting.rate) for method in planned),
        memory_added_per_island=AddedMemory(size.total * F32_BYTES, size.total * F32_BYTES, sum(kept) * F32_BYTES),
        recommended=recommend(setting),
        notes=tuple(notes),
    )


def _figures(method: Method, rate: float | None) -> Figures:
    work = method.work
    largest = max(sum(piece.bits for piece in fragment) for fragment in work.fragments)
    figures = Figures(
        method=method.name.strip(),
        wire=method.wire,
        largest_transfer_bytes=largest / 8,
        bytes_per_step=work.bits_per_period / 8 / work.schedule.effective_period,
        required_rate={f"{target:.0%}": required_rate(work, target) for target in TARGETS},
    )
    if rate is None:
        return figures
    seconds = largest / rate
    return dataclasses.replace(
        figures,
        largest_transfer_seconds=seconds,
        largest_transfer_steps=seconds / work.step_seconds,
        utilization=utilization(work, rate),
    )
