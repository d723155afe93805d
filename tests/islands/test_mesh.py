"""Islands on a mesh: how many, of which devices, and what is refused."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from levanter.utils.mesh import MeshConfig

from helpers.toy_model import trainer_config
from levanter_diloco.islands.mesh import IslandCounts, island_mesh, resolve_islands
from levanter_diloco.options.config import DiLoCoConfig


def resolve(
    num_devices: int = 8, num_slices: int = 1, axes: dict | None = None, dcn_axes: dict | None = None, **options: Any
) -> IslandCounts:
    mesh = MeshConfig(axes=axes or {})
    if dcn_axes is not None:
        mesh = replace(mesh, dcn_axes=dcn_axes)
    return resolve_islands(DiLoCoConfig(**options), mesh, num_devices, num_slices)


@dataclass(frozen=True)
class Device:
    """A device of a machine with slices, as far as the host looks at one."""

    id: int
    slice_index: int
    process_index: int = 0
    platform: str = "cpu"
    device_kind: str = "cpu"


def ids(mesh: Any) -> list[list[int]]:
    return [[device.id for device in slot.flat] for slot in mesh.devices]


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets JAX report eight devices in so many slices."""

    def pretend(num_slices: int) -> None:
        devices = [Device(i, i // (8 // num_slices)) for i in range(8)]
        monkeypatch.setattr(jax, "devices", lambda *_: devices)

    return pretend


def test_islands_default_to_one_a_slice():
    assert resolve(num_slices=4) == IslandCounts(ici=1, dcn=4, per_slot=1)


def test_islands_multiply():
    layout = resolve(num_devices=16, num_slices=2, ici_islands=4, islands_per_slot=3)
    assert layout == IslandCounts(ici=4, dcn=2, per_slot=3)
    assert (layout.num_slots, layout.num_islands) == (8, 24)


@pytest.mark.parametrize(
    ("arguments", "layout"),
    [
        ({"ici_islands": -1, "axes": {"data": 2}}, IslandCounts(4, 1, 1)),
        ({"ici_islands": -1, "axes": {"data": 2, "model": 2}}, IslandCounts(2, 1, 1)),
        ({"ici_islands": -1, "axes": {"data": 1}, "num_slices": 2}, IslandCounts(4, 2, 1)),
        ({"dcn_islands": -1, "num_slices": 8}, IslandCounts(1, 8, 1)),
        ({"dcn_islands": -1, "num_slices": 8, "dcn_axes": {"replica_dcn": 2}}, IslandCounts(1, 4, 1)),
        ({"dcn_islands": -1, "num_slices": 8, "dcn_axes": {"replica_dcn": -1}}, IslandCounts(1, 8, 1)),
        ({"dcn_islands": 2, "num_slices": 8}, IslandCounts(1, 2, 1)),
        ({"axes": {"diloco": 2}}, IslandCounts(2, 1, 1)),
        ({"axes": {"diloco": -1, "data": 4}}, IslandCounts(2, 1, 1)),
        ({"axes": {"diloco": 2}, "ici_islands": 2}, IslandCounts(2, 1, 1)),
        ({"dcn_axes": {"diloco": 4}, "num_slices": 4}, IslandCounts(1, 4, 1)),
        ({"dcn_axes": {"diloco": -1}, "num_slices": 4}, IslandCounts(1, 4, 1)),
    ],
)
def test_islands_resolve(arguments: dict[str, Any], layout: IslandCounts):
    assert resolve(**arguments) == layout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"ici_islands": 2, "axes": {"diloco": 4}},
            "ici_islands (2) must agree with trainer.mesh.axes.diloco (4); leaving one of the two out works.",
        ),
        (
            {"dcn_islands": 2, "dcn_axes": {"diloco": 4}},
            "dcn_islands (2) must agree with trainer.mesh.dcn_axes.diloco (4); leaving one of the two out works.",
        ),
        (
            {"ici_islands": -1},
            "ici_islands (-1) must be a number while trainer.mesh.axes.data is -1 too; ici_islands: 2, or a number "
            "for data, works.",
        ),
        (
            {"dcn_islands": -1, "dcn_axes": {"stage": -1}},
            "dcn_islands (-1) must be a number while trainer.mesh.dcn_axes.stage is -1 too; dcn_islands: 2, or a "
            "number for stage, works.",
        ),
        (
            {"ici_islands": 3},
            "ici_islands (3) must divide the 8 devices of a slice; 1 with trainer.diloco.islands_per_slot: 3 (islands "
            "that share devices) works.",
        ),
        (
            {"dcn_islands": 2},
            "dcn_islands (2) must divide the 1 slices; 1 with trainer.diloco.islands_per_slot: 2 (islands that share "
            "devices) works.",
        ),
    ],
)
def test_islands_that_do_not_fit_are_refused(arguments: dict[str, Any], sentence: str):
    with pytest.raises(ValueError) as error:
        resolve(**arguments)
    assert str(error.value) == f"trainer.diloco.{sentence}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ici_islands": -1, "axes": {"data": 3}}, r"ici_islands \(-1\) must be resolvable: .*'data': 3.* divide 8"),
        (
            {"ici_islands": -1, "axes": {"data": 16}},
            r"ici_islands \(-1\) must be resolvable: .*'data': 16.* divide 8",
        ),
        (
            {"dcn_islands": -1, "dcn_axes": {"replica_dcn": 3}, "num_slices": 4},
            r"dcn_islands \(-1\) must be resolvable: .*'replica_dcn': 3.* divide 4",
        ),
    ],
)
def test_inference_that_leaves_a_rest_is_refused(arguments: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=rf"trainer\.diloco\.{words}"):
        resolve(**arguments)


def test_islands_that_leave_too_few_devices_for_the_mesh_are_refused_by_name():
    # A mesh that takes all eight devices, and two islands: the host would only say that 16 is not 8.
    mesh = MeshConfig(axes={"data": 8})
    with pytest.raises(ValueError, match=r"^trainer\.diloco\.ici_islands \(2\) must "):
        island_mesh(mesh, resolve_islands(DiLoCoConfig(ici_islands=2), mesh, 8, 1), 8, 1)


@pytest.mark.parametrize("count", [0, -2])
@pytest.mark.parametrize("kind", ["axes", "dcn_axes"])
def test_island_axis_of_the_mesh_obeys_the_rule_of_the_option(kind: str, count: int):
    # MaxText's ici = -1 becomes K = -1; here every size below 1 that is not -1 is refused, wherever it is written.
    with pytest.raises(ValueError, match=rf"^trainer\..*\({count}\) must be at least 1"):
        resolve(axes={"diloco": count}) if kind == "axes" else resolve(dcn_axes={"diloco": count})


@given(
    slices=st.sampled_from([1, 2, 4]),
    ici=st.sampled_from([None, -1, 1, 2, 4]),
    dcn=st.sampled_from([None, -1, 1, 2, 4]),
    data=st.sampled_from([None, -1, 1, 2, 4, 8]),
    replica=st.sampled_from([None, -1, 1, 2]),
)
def test_islands_are_never_below_one_and_fit_the_devices(
    slices: int, ici: int | None, dcn: int | None, data: int | None, replica: int | None
):
    axes = {} if data is None else {"data": data}
    dcn_axes = None if replica is None else {"replica_dcn": replica}
    try:
        layout = resolve(8, slices, axes, dcn_axes, ici_islands=ici, dcn_islands=dcn)
    except ValueError as error:
        assert str(error).startswith("trainer.diloco.")
        return
    assert layout.num_islands >= 1
    assert (8 // slices) % layout.ici == 0 and slices % layout.dcn == 0


def test_single_island_from_minus_one_warns(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "levanter_diloco.islands.mesh"):
        assert resolve().num_islands == 1
    assert [record.getMessage() for record in caplog.records] == [
        "trainer.diloco: -1 resolved to a SINGLE island on 8 devices in 1 slice(s): nothing will be exchanged. "
        "For more, set trainer.diloco.ici_islands: 2 (islands inside a slice) or trainer.diloco.islands_per_slot: "
        "2 (islands that share devices), or run on several slices. trainer.diloco.dcn_islands: 1 says that one is "
        "meant."
    ]


@pytest.mark.parametrize(
    "arguments",
    [{"dcn_islands": 1}, {"ici_islands": 2}, {"islands_per_slot": 2}, {"num_slices": 2}],
    ids=["one is meant", "ici", "slot", "slices"],
)
def test_no_warning_where_one_island_is_meant_or_there_are_more(arguments: dict, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "levanter_diloco.islands.mesh"):
        resolve(**arguments)
    assert caplog.records == []


def test_island_axis_comes_first_and_islands_are_blocks_of_devices():
    mesh_config = MeshConfig(axes={"data": -1, "model": 2})
    mesh = island_mesh(mesh_config, IslandCounts(2, 1, 1), 8, 1)
    assert mesh.axis_names[0] == "diloco"
    assert mesh.shape == {"diloco": 2, "data": 2, "model": 2, "replica": 1, "replica_dcn": 1}
    assert ids(mesh) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_island_axis_written_last_by_the_user_still_comes_first():
    mesh = island_mesh(MeshConfig(axes={"data": -1, "diloco": 4}), IslandCounts(4, 1, 1), 8, 1)
    assert mesh.axis_names[0] == "diloco"
    assert ids(mesh) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_islands_on_one_slot_share_its_devices():
    mesh = island_mesh(MeshConfig(axes={"data": -1}), IslandCounts(2, 1, 3), 8, 1)
    assert mesh.shape["diloco"] == 2 and mesh.shape["data"] == 4


@pytest.mark.parametrize(
    ("num_slices", "layout", "islands"),
    [
        (2, IslandCounts(1, 2, 1), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (2, IslandCounts(2, 2, 1), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (4, IslandCounts(1, 4, 1), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (4, IslandCounts(2, 4, 1), [[0], [1], [2], [3], [4], [5], [6], [7]]),
    ],
)
def test_islands_never_cross_slices(slices: Any, num_slices: int, layout: IslandCounts, islands: list[list[int]]):
    slices(num_slices)
    mesh = island_mesh(MeshConfig(axes={"data": -1}), layout, 8, num_slices)
    assert mesh.axis_names[0] == "diloco" and "diloco_dcn" not in mesh.axis_names
    assert ids(mesh) == islands


def test_island_may_span_slices_if_asked(slices: Any):
    # Two islands on four slices: the host's own absorber makes each two slices wide.
    slices(4)
    mesh = island_mesh(MeshConfig(axes={"data": -1}), resolve(num_slices=4, dcn_islands=2), 8, 4)
    assert mesh.shape["diloco"] == 2 and mesh.shape["replica_dcn"] == 2
    assert [sorted(island) for island in ids(mesh)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_trainer_config_finds_the_slices(slices: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    slices(4)
    monkeypatch.setattr(jax, "device_count", lambda *_: 8)
    config = trainer_config(tmp_path, {})
    assert config.islands == IslandCounts(1, 4, 1)
    assert ids(config.device_mesh) == [[0, 1], [2, 3], [4, 5], [6, 7]]
