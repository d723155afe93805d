"""The `diloco` axis of the device mesh: how many islands there are, and which devices each one has."""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from jax.sharding import Mesh
from levanter.utils.mesh import DEFAULT_DCN_AXIS_SPEC, DEFAULT_ICI_AXIS_SPEC, MeshConfig, create_mesh_from_axis_specs

from ..axes import ISLAND
from ..errors import PATH, OptionError, option_error
from ..options.config import DiLoCoConfig

DCN_ISLAND = "diloco_dcn"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class IslandCounts:
    """Islands in a slice, across slices, and on one slot of the mesh axis `diloco`."""

    ici: int
    dcn: int
    per_slot: int

    @property
    def num_slots(self) -> int:
        return self.ici * self.dcn

    @property
    def num_islands(self) -> int:
        """K."""
        return self.num_slots * self.per_slot


def resolve_islands(diloco: DiLoCoConfig, mesh: MeshConfig, num_devices: int, num_slices: int) -> IslandCounts:
    """Settles the island counts from the options, the user's own mesh and the devices.

    Raises:
        OptionError: If an option and the mesh disagree, or a -1 cannot be resolved.
    """
    _check_sizes("mesh.axes", mesh.axes)
    _check_sizes("mesh.dcn_axes", mesh.dcn_axes)
    ici = _agreed("ici_islands", diloco.ici_islands, "mesh.axes", mesh.axes, default=1)
    dcn = _agreed("dcn_islands", diloco.dcn_islands, "mesh.dcn_axes", mesh.dcn_axes, default=-1)
    inferred = -1 in (ici, dcn)
    if ici == -1:
        ici = _infer("ici_islands", "mesh.axes", {**DEFAULT_ICI_AXIS_SPEC, **mesh.axes}, num_devices // num_slices)
    if dcn == -1:
        # The host's own absorber of slices gives way: with islands, a slice is an island by default.
        others = {name: size for name, size in mesh.dcn_axes.items() if DEFAULT_DCN_AXIS_SPEC.get(name) != size}
        dcn = _infer("dcn_islands", "mesh.dcn_axes", others, num_slices)
    per_slice = num_devices // num_slices
    for option, count, available in (("ici_islands", ici, per_slice), ("dcn_islands", dcn, num_slices)):
        if available % count != 0:
            unit = "devices of a slice" if option == "ici_islands" else "slices"
            works = f"1 with {PATH}.islands_per_slot: {count} (islands that share devices)"
            raise option_error(option, count, f"divide the {available} {unit}", works)
    islands = IslandCounts(ici, dcn, diloco.islands_per_slot)
    if inferred and islands.num_islands == 1:
        logger.warning(
            f"{PATH}: -1 resolved to a SINGLE island on {num_devices} devices in {num_slices} slice(s): nothing will "
            f"be exchanged. For more, set {PATH}.ici_islands: 2 (islands inside a slice) or {PATH}.islands_per_slot: "
            f"2 (islands that share devices), or run on several slices. {PATH}.dcn_islands: 1 says that one is meant."
        )
    return islands


def island_mesh(mesh: MeshConfig, islands: IslandCounts, num_devices: int, num_slices: int) -> Mesh:
    """Builds the host's mesh with `diloco` as its first axis, so that islands never interleave.

    Raises:
        OptionError: If the islands and the mesh's other axes do not fit the devices.
    """
    without = {name: size for name, size in mesh.axes.items() if name != ISLAND}
    dcn_without = {name: size for name, size in mesh.dcn_axes.items() if name != ISLAND}
    sized = dataclasses.replace(
        mesh, axes={**without, ISLAND: islands.ici}, dcn_axes={**dcn_without, DCN_ISLAND: islands.dcn}
    )
    try:
        ici, dcn = sized.axis_shapes(num_devices, num_slices)
    except ValueError as error:
        rule = f"leave devices for trainer.mesh.axes ({dict(without)}): {error}"
        raise option_error("ici_islands", islands.ici, rule, "trainer.mesh.axes: {data: -1}") from error
    # Outermost on either side, or islands of several slices would interleave.
    host_mesh = create_mesh_from_axis_specs(
        ici_axes={ISLAND: ici.pop(ISLAND), **ici}, dcn_axes={DCN_ISLAND: dcn.pop(DCN_ISLAND), **dcn}
    )
    # The host puts the axes of a slice behind those across slices; `diloco` has to come first of all.
    names = [name for name in host_mesh.axis_names if name not in (ISLAND, DCN_ISLAND)]
    order = [host_mesh.axis_names.index(name) for name in (DCN_ISLAND, ISLAND, *names)]
    devices = host_mesh.devices.transpose(order)
    return Mesh(devices.reshape(islands.num_slots, *devices.shape[2:]), (ISLAND, *names))


def _check_sizes(path: str, axes: Mapping[str, int | None]) -> None:
    for name, size in axes.items():
        if size is None or (size != -1 and size < 1):  # null in YAML
            raise OptionError(f"trainer.{path}.{name} ({size}) must be at least 1, or -1 to infer it; 2 works.")


def _agreed(option: str, value: int | None, path: str, axes: Mapping[str, int], default: int) -> int:
    # MaxText's users know the count as a mesh axis; both spellings mean the same.
    if ISLAND not in axes:
        return default if value is None else value
    if value not in (None, axes[ISLAND]):
        rule = f"agree with trainer.{path}.{ISLAND} ({axes[ISLAND]})"
        raise option_error(option, value, rule, "leaving one of the two out")
    return axes[ISLAND]


def _infer(option: str, path: str, axes: Mapping[str, int], available: int) -> int:
    others = {name: size for name, size in axes.items() if name != ISLAND}
    if absorbers := [name for name, size in others.items() if size == -1]:
        rule = f"be a number while trainer.{path}.{absorbers[0]} is -1 too"
        raise option_error(option, -1, rule, f"{option}: 2, or a number for {absorbers[0]},")
    # What the user's other axes leave of the devices.
    islands, left = divmod(available, prod(others.values()))
    if left or islands == 0:
        rule = f"be resolvable: trainer.{path} {others} does not divide {available}"
        raise option_error(option, -1, rule, f"trainer.{path}: {{}} with {option}: -1")
    return islands
