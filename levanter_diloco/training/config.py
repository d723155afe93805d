"""Levanter's trainer options with the block `diloco`, checked against the devices before anything is built."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from haliax.partitioning import ResourceMapping
from jax.sharding import Mesh
from levanter.schedule import ScheduleStep, distinct_values
from levanter.trainer import TrainerConfig

from ..algorithm.participation import Participation
from ..axes import ISLAND
from ..errors import PATH, OptionError, option_error
from ..host.moe import TOKENS
from ..islands.mesh import IslandCounts, island_mesh, resolve_islands
from ..islands.placement import Placement
from ..options.config import DiLoCoConfig


@dataclass
class DiLoCoTrainerConfig(TrainerConfig):
    """`trainer:` with the block `diloco`. Without the block it is the host's own `TrainerConfig`."""

    diloco: DiLoCoConfig = field(default_factory=lambda: DiLoCoConfig(enabled=False))

    @cached_property
    def islands(self) -> IslandCounts:
        """How many islands there are and where; needs the devices."""
        return resolve_islands(self.diloco, self.mesh, jax.device_count(), self.num_slices)

    @cached_property
    def participation(self) -> Participation:
        """Which islands train when, and with which weight each takes part in a sync."""
        diloco, num_islands = self.diloco, self.islands.num_islands
        counts = tuple((step, count) for step, count in diloco.schedule_islands or ())
        for _, count in counts:
            if count > num_islands:
                works = [[step, min(count, num_islands)] for step, count in counts]
                rule = f"name at most the {num_islands} islands that there are"
                raise option_error("schedule_islands", diloco.schedule_islands, rule, works)
        shares = () if isinstance(diloco.weights, str) else tuple(diloco.weights)
        if shares and len(shares) != num_islands:
            rule = f"have one number for each of the {num_islands} islands"
            raise option_error("weights", diloco.weights, rule, [1.0] * num_islands)

        for step, count in counts if shares else ():
            if not any(shares[:count]):
                rule = f"give one of the first {count} islands a weight, which alone train from step {step} on"
                raise option_error("weights", diloco.weights, rule, [1.0] * num_islands)

        def rows(completed: int) -> int:
            return self.batch_schedule.batch_size_at_step(completed)

        consumed = rows if diloco.weights == "tokens" else None
        return Participation(num_islands, diloco.schedule, self.seed, diloco.drop_rate, counts, shares, consumed)

    @cached_property
    def device_mesh(self) -> Mesh:
        if not self.diloco.enabled:
            return super().device_mesh
        return island_mesh(self.mesh, self.islands, jax.device_count(), self.num_slices)

    @cached_property
    def mesh_axis_specs(self) -> list[str]:
        return list(self.device_mesh.axis_names)

    @cached_property
    def _mesh_axis_totals(self) -> dict[str, int]:
        return dict(self.device_mesh.shape)

    @property
    def compute_axis_mapping(self) -> ResourceMapping:
        mapping = super().compute_axis_mapping
        if not self.diloco.enabled:
            return mapping
        return {**mapping, self._batch: (ISLAND, *self.data_axes), ISLAND: ISLAND}

    @property
    def parameter_axis_mapping(self) -> ResourceMapping:
        mapping = super().parameter_axis_mapping
        return {**mapping, ISLAND: ISLAND} if self.diloco.enabled else mapping

    @property
    def _batch(self) -> str:
        return str(self.batch_axis_name)  # None is refused

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The mesh axes over which one island's batch is split."""
        axes = super().compute_axis_mapping[self._batch]
        return tuple(name for name in ([axes] if isinstance(axes, str) else axes) if name != ISLAND)

    @property
    def island_sharding(self) -> dict[str, int]:
        """Over how many devices of an island each named axis of a parameter is split, where it is."""
        sizes = {}
        for logical, axes in self.parameter_axis_mapping.items():
            names = [name for name in ([axes] if isinstance(axes, str) else axes) if name != ISLAND]
            sizes[logical] = math.prod(self.device_mesh.shape[name] for name in names)
        return {logical: size for logical, size in sizes.items() if size > 1}

    @property
    def own_checkpoint_paths(self) -> list[str]:
        """Where the run saves its checkpoints; it has an id by then."""
        own = self.checkpointer
        paths = (own.expanded_path(self.id), own.expanded_temporary_path(self.id))
        return [path for path in paths if path is not None]

    @property
    def placement(self) -> Placement:
        """Where the arrays of the run's state lie."""
        return Placement(self.device_mesh, self.parameter_axis_mapping, self.diloco.outer_memory)

    @cached_property
    def island_config(self) -> "IslandTrainerConfig":
        """Options of the host trainer that one island runs; set by validation, from the options as written."""
        raise AttributeError("the trainer's options are not validated yet: call initialize() first")

    def _validate_and_set_defaults(self) -> None:
        if self.diloco.enabled:
            self._refuse_what_islands_cannot_do()
            self._refuse_what_experts_cannot_do()
            self.placement.check()
            _ = self.participation  # refused here, if at all
            if self.diloco.guard:  # which takes their place: one bad island does not stop the run
                self.crash_on_nan = self.crash_on_inf = False
            self._check_island_data()
            # Any: the fields' own types
            options: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
            options["train_batch_size"] = self._island_batch_size()
            # The host trainer of an island sees B/K rows: its microbatches and its accumulation follow from that.
            self.island_config = IslandTrainerConfig(**options)
            self.island_config.islands, self.island_config.device_mesh = self.islands, self.device_mesh
            self.island_config._validate_and_set_defaults()
        super()._validate_and_set_defaults()

    def _refuse_what_islands_cannot_do(self) -> None:
        reasons = {
            "model_averaging": "the outer model is the average that is evaluated and exported",
            "quantization": "its statistics belong to an island and have no outer gradient",
            "use_explicit_mesh_axes": "an island's step needs automatic data and model axes",
        }
        for option, reason in reasons.items():
            if value := getattr(self, option):
                raise OptionError(f"trainer.{option} ({value}) does not work with {PATH}: {reason}; leave it out.")
        if self.num_train_steps < 1:
            raise OptionError(f"trainer.num_train_steps ({self.num_train_steps}) must be at least 1; 1000 works.")
        if self.batch_axis_name is None:
            raise OptionError(
                f"trainer.mesh.batch_axis_name (None) must name the axis that {PATH} splits; batch works."
            )

    def _refuse_what_experts_cannot_do(self) -> None:
        """A device computes all experts for the tokens of its own rows; no token is sent to where an expert lies."""
        batch = self._several(self.data_axes)
        rules = dict.fromkeys(TOKENS, (batch, f"lie where the batch does ({', '.join(batch)})", "leaving it out"))
        stored = "trainer.mesh.param_mapping: {experts: data}, which only stores them apart,"
        rules["experts"] = ((), "be left out: every device computes all experts for its own tokens", stored)
        for logical, (fits, rule, works) in rules.items():
            axes = self._several(self.mesh.resolved_compute_mapping.get(logical, ()))
            if axes not in ((), fits):
                option = "compute_mapping" if logical in self.mesh.compute_mapping else "shared_mapping"
                raise OptionError(f"trainer.mesh.{option}.{logical} ({', '.join(axes)}) must {rule}; {works} works.")

    def _several(self, axes: str | Sequence[str]) -> tuple[str, ...]:
        """Those of the mesh axes that have several devices of an island."""
        names = [axes] if isinstance(axes, str) else axes
        return tuple(name for name in names if name != ISLAND and self.device_mesh.shape.get(name, 1) > 1)

    def _check_island_data(self) -> None:
        mixtures, num_islands = self.diloco.island_data, self.islands.num_islands
        if not isinstance(mixtures, str) and len(mixtures) != num_islands:
            rule = f"hold one for each of the {num_islands} islands"
            raise option_error("island_data", f"{len(mixtures)} mixtures", rule, f"a list of {num_islands}")

    def _island_batch_size(self) -> int | list[ScheduleStep[int]]:
        """B / K, for every phase of the batch schedule; fills in B where only the batch per device is given."""
        num_islands = self.islands.num_islands
        if (given := self.per_device_parallelism) != -1 and given < 1:
            raise OptionError(f"trainer.per_device_parallelism ({given}) must be at least 1, or -1 for all; -1 works.")
        per_device = max(self.per_device_parallelism, 1)
        # Every device of every island gets at least one microbatch of rows.
        rows = num_islands * per_device
        for name in self.data_axes:
            rows *= self.device_mesh.shape[name]
        if self.train_batch_size == -1 and self.per_device_parallelism != -1:
            self.train_batch_size = rows
        phases = self.train_batch_size
        if not isinstance(phases, int) and (not phases or phases[0].start != 0):
            raise OptionError(f"trainer.train_batch_size ({phases}) must say the batch of step 0; {rows} works.")
        for size in distinct_values(self.train_batch_size):
            if size < 1 or size % rows != 0:
                raise OptionError(
                    f"trainer.train_batch_size ({size}) must be a multiple of {rows}: {num_islands} islands x "
                    f"{rows // num_islands} rows (the island's data axes x trainer.per_device_parallelism); "
                    f"{max(-(-size // rows), 1) * rows} works."
                )
        if isinstance(self.train_batch_size, int):
            return self.train_batch_size // num_islands
        return [ScheduleStep(phase.start, phase.value // num_islands) for phase in self.train_batch_size]


@dataclass
class IslandTrainerConfig(DiLoCoTrainerConfig):
    """The options as one island sees them: the run's mesh and model axes, and its own share of the batch."""

    @property
    def compute_axis_mapping(self) -> ResourceMapping:
        mapping = {**super().compute_axis_mapping, self._batch: self.data_axes}
        return {logical: axes for logical, axes in mapping.items() if logical != ISLAND}

    @property
    def parameter_axis_mapping(self) -> ResourceMapping:
        return {logical: axes for logical, axes in super().parameter_axis_mapping.items() if logical != ISLAND}

    def _validate_and_set_defaults(self) -> None:
        super(DiLoCoTrainerConfig, self)._validate_and_set_defaults()
