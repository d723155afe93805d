"""Options of `trainer.diloco`, and the rules that need nothing but the options themselves."""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from ..algorithm.schedule import Schedule
from ..algorithm.wire import wire_names
from ..network.link import LinkConfig
from .outer import NesterovConfig, OuterOptimizerConfig
from .rules import require, require_one_of

LayerOrder = Literal["interleaved", "sequential"]

PartitionName = Literal["layers", "balanced"]

WireRounding = Literal["nearest", "stochastic"]

OuterMemory = Literal["device", "pinned_host", "sharded"]

WeightRule = Literal["uniform", "tokens"]

JoinMoments = Literal["fresh", "copied"]

IslandData = Literal["shared", "sharded"]

ResumeIslands = Literal["copy_nearest", "fresh", "mean"]

OnDamagedCheckpoint = Literal["refuse", "previous"]


@dataclass(frozen=True)
class DiLoCoConfig:
    """How islands train apart and when they meet: the block `trainer.diloco`."""

    enabled: bool = True
    """False runs stock Levanter. Writing the block turns DiLoCo on; an empty block is `diloco: {}`."""

    sync_period: int = 100
    """H: inner steps between two syncs of the same fragment; >= 1. Best a multiple of `num_fragments`."""

    num_fragments: int = 1
    """P: parts that sync in turn; 1 is vanilla DiLoCo, more is Streaming DiLoCo [Streaming]. With `partition: layers`
    P-1 divides the number of layers."""

    layer_order: LayerOrder = "interleaved"
    """Which layers share a fragment: `interleaved`, every (P-1)-th one, or `sequential`, runs of neighbours
    [Streaming]."""

    partition: PartitionName = "layers"
    """`layers`: fragment 0 is all that is outside the layer stack, the others N/(P-1) layers each [Streaming].
    `balanced`: fragments of equal bytes, for any model and any P: each takes its share of the rows of every leaf."""

    overlap_steps: int = 0
    """V: inner steps between the capture of a fragment and its merge; 0 <= V < effective period. It crosses meanwhile,
    in V pieces (at most one for each step between two syncs)."""

    mixing_alpha: float = 0.0
    """alpha in [0, 1]: share of the island kept when a fragment merges [Streaming]. 0 replaces it."""

    outer: OuterOptimizerConfig = field(default_factory=NesterovConfig)
    """The outer optimizer: `type: nesterov | sgd | adam | average`, or a registered one."""

    ici_islands: int | None = None
    """Islands within a slice; -1 takes all devices that other mesh axes leave. Unset: `mesh.axes.diloco`, else 1."""

    dcn_islands: int | None = None
    """Islands across slices; -1 is one per slice. Unset: `mesh.dcn_axes.diloco`, else -1."""

    islands_per_slot: int = 1
    """Islands that share the devices of one mesh slot and run one after another; K is a multiple of it."""

    outer_memory: OuterMemory = "device"
    """Where Theta and the outer optimizer's state lie. `device`; `pinned_host`: host memory, from where a sync brings
    one fragment to the device and an evaluation the outer model; `sharded`: the optimizer's state spread over islands.
    """

    final_sync: bool = True
    """Whether fragments with unsynced progress sync once more after the last step, before the last checkpoint and
    export: a whole outer step, momentum included, however few steps are unsynced. Best end on a whole period."""

    wire: str = "f32"
    """How an outer gradient crosses: f32, bf16, int8, int4, e3m0 (FP4 of [Streaming]), or a registered format."""

    wire_block: int = 256
    """Elements that share a scale on the wire; even, in [2, 65536]. An f32 scale a block adds 32 / 256 bits an
    element."""

    wire_rounding: WireRounding = "nearest"
    """To the `nearest` value on the wire, or `stochastic`: at random so that the expected value is kept (seeded by
    `trainer.seed`)."""

    error_feedback: bool = False
    """Whether what the wire loses is sent along next time; costs an f32 copy of the parameters for each island."""

    drop_rate: float = 0.0
    """Probability in [0, 1] that an island's outer gradient is lost in a sync; the island trains on [DiLoCo]."""

    schedule_islands: list[list[int]] | None = None
    """`[[step, count], ...]`: how many islands train once `step` steps are completed, from step 0 on [DiLoCo]."""

    join_moments: JoinMoments = "fresh"
    """Inner moments of an island that joins by `schedule_islands`: `fresh`, or `copied` from island 0."""

    resume_islands: ResumeIslands = "copy_nearest"
    """What islands become where a resume changes K. `copy_nearest`: island j goes on as the old island `j*K_old // K`;
    `fresh`: as Theta, with fresh moments; `mean`: as the mean of the old islands that it replaces."""

    weights: WeightRule | list[float] = "uniform"
    """Weights of the islands in a mean: `uniform`, `tokens` (what each has consumed since the fragment's last sync),
    or a list of one number each."""

    island_data: IslandData | list[dict[str, float]] = "shared"
    """What an island reads: `shared`, its part of each global batch; `sharded`, its shard of every component of the
    data; or shards in proportion to a mixture of its own, `[{component: weight}, ...]` with one for each island."""

    guard: bool = True
    """Whether an island with a loss, parameters or an outer gradient that is not finite is left out and re-seeded."""

    guard_factor: float | None = None
    """Leaves out an island whose outer gradient's norm exceeds this multiple of the median, too; > 1."""

    initialize_from_orbax: str | None = None
    """Where the outer model of a run that starts comes from: what `levanter-diloco export --format orbax` wrote."""

    on_damaged_checkpoint: OnDamagedCheckpoint = "refuse"
    """What a run that resumes does where its latest checkpoint is damaged: `refuse`, end; `previous`, use the one
    before it."""

    link: LinkConfig | None = None
    """A slow link that `tc` makes of this host's own for the run; unset, the network is left alone."""

    def __post_init__(self) -> None:
        require_one_of(get_args(LayerOrder), "layer_order", self.layer_order)
        require_one_of(get_args(PartitionName), "partition", self.partition)
        require_one_of(get_args(OuterMemory), "outer_memory", self.outer_memory)
        require(self.sync_period >= 1, "sync_period", self.sync_period, "be at least 1", 100)
        require(self.num_fragments >= 1, "num_fragments", self.num_fragments, "be at least 1 (vanilla)", 1)
        require(0 <= self.mixing_alpha <= 1, "mixing_alpha", self.mixing_alpha, "lie in [0, 1]", 0.5)
        require(self.islands_per_slot >= 1, "islands_per_slot", self.islands_per_slot, "be at least 1", 2)
        require_one_of(wire_names(), "wire", self.wire)
        require_one_of(get_args(WireRounding), "wire_rounding", self.wire_rounding)
        block = self.wire_block
        require(block >= 2 and block % 2 == 0, "wire_block", block, "be even and at least 2", 256)
        require(block <= 2**16, "wire_block", block, "be at most 65536: arrays are padded to whole blocks", 256)
        lossy = self.wire != "f32"
        require(lossy or not self.error_feedback, "error_feedback", True, "be false with wire f32", "wire: int4")
        require(0 <= self.drop_rate <= 1, "drop_rate", self.drop_rate, "lie in [0, 1]", 0.1)
        require_one_of(get_args(JoinMoments), "join_moments", self.join_moments)
        require_one_of(get_args(ResumeIslands), "resume_islands", self.resume_islands)
        require_one_of(get_args(OnDamagedCheckpoint), "on_damaged_checkpoint", self.on_damaged_checkpoint)
        self._check_weights()
        self._check_island_data()
        if (counts := self.schedule_islands) is not None:
            rule = "be [step, count] pairs from step 0 on, the steps rising, the counts at least 1"
            require(_are_phases(counts), "schedule_islands", counts, rule, [[0, 1], [100, 2]])
        if (factor := self.guard_factor) is not None:
            require(1 < factor < math.inf, "guard_factor", factor, "be finite and above 1", 10)
            require(self.guard, "guard_factor", factor, "be left out while guard is false", "guard: true")
        for name in ("ici_islands", "dcn_islands"):
            count = getattr(self, name)
            require(count is None or count == -1 or count >= 1, name, count, "be at least 1, or -1 to infer it", 2)
        period = self.schedule.effective_period
        rule = f"be at least 0 and below the effective period ({period} steps)"
        require(0 <= self.overlap_steps < period, "overlap_steps", self.overlap_steps, rule, period - 1)

    def _check_weights(self) -> None:
        if isinstance(self.weights, str):
            require_one_of(get_args(WeightRule), "weights", self.weights)
        else:
            rule = "be finite numbers of at least 0, not all 0"
            with np.errstate(over="ignore"):
                shares = np.asarray(self.weights, np.float32)
            good = bool(np.all(shares >= 0) and 0 < np.max(shares, initial=0) < np.inf)
            require(good, "weights", self.weights, rule, [1.0, 2.0])

    def _check_island_data(self) -> None:
        if isinstance(self.island_data, str):
            require_one_of(get_args(IslandData), "island_data", self.island_data)
            return
        rule = "give each island weights that are finite numbers of at least 0, not all 0"
        good = all(
            all(0 <= weight < math.inf for weight in mixture.values()) and any(mixture.values())
            for mixture in self.island_data
        )
        require(good and bool(self.island_data), "island_data", self.island_data, rule, [{"web": 1.0}, {"code": 1.0}])

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.sync_period, self.num_fragments, self.overlap_steps)


def _are_phases(counts: list[list[int]]) -> bool:
    """Whether `counts` are `[step, count]` pairs that say something for every step."""
    pairs = bool(counts) and all(len(entry) == 2 and entry[1] >= 1 for entry in counts)
    steps = [entry[0] for entry in counts] if pairs else []
    return pairs and steps[0] == 0 and steps == sorted(set(steps))
