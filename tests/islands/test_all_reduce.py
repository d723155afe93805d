import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from haliax.partitioning import pspec_for_axis
from haliax.util import is_named_array
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding

from helpers.toy_model import cache_sizes
from levanter_diloco.algorithm.codecs import F32, wire_format
from levanter_diloco.algorithm.outer import outer_gradient
from levanter_diloco.algorithm.wire import WireFormat, wire_names
from levanter_diloco.islands.all_reduce import AllReduce
from levanter_diloco.islands.vector_mean import VectorMean

Embed, Mlp, Row = Axis("embed", 8), Axis("mlp", 6), Axis("row", 3)
MAPPING = {"diloco": "diloco", "embed": "data", "mlp": "model"}

LEAVES: dict[str, tuple[Axis, ...]] = {
    "sharded": (Row, Embed),
    "tensor": (Mlp,),
    "both": (Embed, Mlp),
    "replicated": (Axis("head", 12),),
    "odd": (Axis("head", 7), Axis("key", 5)),
    "scalar": (),
    "single": (Axis("head", 1),),
}
"""By how a leaf lies inside an island."""

MESHES = {
    "2 islands x 4 data": {"diloco": 2, "data": 4, "model": 1},
    "2 islands x 2 data x 2 model": {"diloco": 2, "data": 2, "model": 2},
    "4 islands x 2 data": {"diloco": 4, "data": 2, "model": 1},
    "4 islands x 2 model": {"diloco": 4, "data": 1, "model": 2},
    "8 islands of 1 device": {"diloco": 8, "data": 1, "model": 1},
    "1 island x 8 data": {"diloco": 1, "data": 8, "model": 1},
}


F32_WIRE = F32(2)


def mesh_of(name: str) -> Mesh:
    shape = MESHES[name]
    return Mesh(np.array(jax.devices()).reshape(tuple(shape.values())), tuple(shape))


def gradients_on(mesh: Mesh, leaves: dict[str, tuple[Axis, ...]], islands_per_slot: int = 1, seed: int = 0) -> Any:
    """A random tree, each leaf placed as the state's own; `frozen` is no leaf."""
    Island = Axis("diloco", mesh.shape["diloco"] * islands_per_slot)
    random = np.random.default_rng(seed)

    def leaf(axes: tuple[Axis, ...]) -> NamedArray:
        axes = (Island, *axes)
        values = jnp.asarray(random.normal(size=[axis.size for axis in axes]), jnp.float32)
        where = NamedSharding(mesh, pspec_for_axis([axis.name for axis in axes], MAPPING))
        return hax.named(jax.device_put(values, where), axes)

    return {**{name: leaf(axes) for name, axes in leaves.items()}, "frozen": None}


def alike(gradients: Any) -> jax.Array:
    """Equal weights."""
    return jnp.ones(jax.tree.leaves(gradients, is_leaf=is_named_array)[0].axes[0].size)


def weights_bytes(gradients: Any) -> int:
    """What a device sends besides a fragment: a place for the weight of each island."""
    return 4 * alike(gradients).size


def compiled(mesh: Mesh, gradients: Any, wire: WireFormat = F32_WIRE) -> jax.stages.Compiled:
    all_reduce = AllReduce(mesh, MAPPING, wire)
    return jax.jit(lambda tree: all_reduce.mean(tree, alike(tree), jax.random.key(0)).mean).lower(gradients).compile()


def exact_mean(x: NamedArray) -> np.ndarray:
    return np.asarray(x.array, np.float64).mean(0)


def fragment_bytes(gradients: Any) -> int:
    """Of one island, in f32."""
    return sum(4 * prod(x.array.shape[1:]) for x in jax.tree.leaves(gradients, is_leaf=is_named_array))


def padding_bytes(mesh: Mesh, gradients: Any) -> int:
    """At most one element for each device of an island and each way of being replicated there."""
    leaves = jax.tree.leaves(gradients, is_leaf=is_named_array)
    specs = {tuple(pspec_for_axis(leaf.axis_names, MAPPING)) for leaf in leaves}
    copied = {tuple(name for name in ("data", "model") if name not in spec) for spec in specs}
    devices = mesh.size // mesh.shape["diloco"]
    return sum(4 * devices * (prod(mesh.shape[name] for name in names) > 1) for names in copied)


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program."""

    kind: str
    groups: tuple[tuple[int, ...], ...]
    """Devices that talk to each other, as positions in the mesh."""
    sent: int
    """Bytes of the result on one device, which for an all-reduce is also what the device puts in."""


BYTES = {"f32": 4, "u32": 4, "s32": 4, "bf16": 2, "f16": 2, "u16": 2, "u8": 1, "s8": 1, "pred": 1, "f64": 8}
COLLECTIVE = re.compile(
    r"= (?P<shape>\(.*?\)|\S+) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|"
    r"collective-broadcast|ragged-all-to-all|send|recv)(-start)?\("
)


def replica_groups(text: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """The groups of one HLO line: by mesh axes, as an iota `[groups,size]<=[dims]T(order)`, listed, or as pairs."""
    everyone = (tuple(range(num_devices)),)
    if axes := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}(,|$)", text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes[1])}
        over = re.findall(r"'(\w+)'", axes[2])
        order = [i for i, name in enumerate(sizes) if name not in over] + [list(sizes).index(name) for name in over]
        devices = np.arange(num_devices).reshape(list(sizes.values())).transpose(order)
        return tuple(map(tuple, devices.reshape(-1, prod(sizes[name] for name in over)).tolist()))
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, dims, order = ([int(n) for n in part.split(",")] if part else None for part in iota.groups())
        assert shape is not None and dims is not None
        devices = np.arange(prod(dims)).reshape(dims)
        return tuple(map(tuple, (devices if order is None else devices.transpose(order)).reshape(shape).tolist()))
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", text):
        groups = re.findall(r"\{([\d,]+)\}", listed[1])
        return tuple(tuple(int(n) for n in group.split(",")) for group in groups) or everyone
    assert "replica_groups" not in text and "source_target_pairs" not in text, f"groups of another form: {text}"
    return everyone


def collectives(hlo: str, num_devices: int) -> Iterator[Collective]:
    for line in hlo.splitlines():
        if found := COLLECTIVE.search(line):
            arrays = re.findall(r"(\w+)\[([\d,]*)\]", found["shape"])
            sent = sum(BYTES[kind] * prod(int(n) for n in dims.split(",") if n) for kind, dims in arrays)
            yield Collective(found["kind"], replica_groups(line, num_devices), sent)


def between_islands(hlo: str | None, mesh: Mesh) -> list[Collective]:
    """The collectives of which some group spans two islands."""
    assert hlo
    per_island = mesh.size // mesh.shape["diloco"]
    return [
        collective
        for collective in collectives(hlo, mesh.size)
        if any(len({device // per_island for device in group}) > 1 for group in collective.groups)
    ]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("replica_groups={}", ((0, 1, 2, 3),)),
        ("channel_id=1", ((0, 1, 2, 3),)),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("replica_groups=[4,2]<=[2,2,2]T(1,2,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
    ],
)
def test_replica_groups_are_read_in_every_form(text: str, groups: tuple):
    num_devices = 8 if "2,2,2" in text else 4
    assert replica_groups(f"x = f32[2] all-reduce(y), {text}, use_global_device_ids=true", num_devices) == groups


def test_collectives_are_found_in_hlo():
    # A psum over all devices and an all-gather over pairs, so that the byte counts below cannot be empty by accident.
    mesh = mesh_of("4 islands x 2 data")

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.psum(x, ("diloco", "data")), jax.lax.all_gather(x, "data", tiled=True)

    spec = jax.sharding.PartitionSpec
    out_specs = (spec(), spec("diloco"))
    program = jax.jit(
        jax.shard_map(both, mesh=mesh, in_specs=spec(("diloco", "data")), out_specs=out_specs, check_vma=False)
    )
    hlo = program.lower(jnp.ones((24,), jnp.float32)).compile().as_text()
    assert hlo
    assert {(c.kind, len(c.groups), c.sent) for c in collectives(hlo, 8)} == {
        ("all-reduce", 1, 12),
        ("all-gather", 4, 24),
    }
    assert [c.kind for c in between_islands(hlo, mesh)] == ["all-reduce"]


def test_mean_by_hand():
    # Islands 1 and 2 on each element but the last, where they are 5 and -1.
    mesh = mesh_of("2 islands x 4 data")
    gradients = {"embed": hax.named(jnp.array([[1.0] * 7 + [5.0], [2.0] * 7 + [-1.0]]), (Axis("diloco", 2), Embed))}
    mean = AllReduce(mesh, MAPPING, F32(2)).mean(gradients, jnp.ones(2), jax.random.key(0)).mean["embed"]
    assert mean.axes == (Embed,)
    assert mean.array.tolist() == [1.5] * 7 + [2.0]


@pytest.mark.parametrize("name", MESHES)
def test_mean_is_the_definition(name: str):
    mesh = mesh_of(name)
    gradients = gradients_on(mesh, LEAVES)
    means, expected = compiled(mesh, gradients)(gradients), outer_gradient(gradients)
    assert means["frozen"] is None
    for leaf in LEAVES:
        assert means[leaf].axes == expected[leaf].axes and means[leaf].dtype == jnp.float32
        if mesh.shape["diloco"] <= 2:
            assert np.array_equal(means[leaf].array, expected[leaf].array), leaf
        np.testing.assert_allclose(means[leaf].array, exact_mean(gradients[leaf]), atol=1e-6, rtol=0, err_msg=leaf)


@pytest.mark.parametrize("islands_per_slot", [2, 3])
@pytest.mark.parametrize("name", ["2 islands x 2 data x 2 model", "8 islands of 1 device", "1 island x 8 data"])
def test_mean_counts_every_island_of_a_slot(name: str, islands_per_slot: int):
    mesh = mesh_of(name)
    gradients = gradients_on(mesh, LEAVES, islands_per_slot)
    means = compiled(mesh, gradients)(gradients)
    for leaf in LEAVES:
        np.testing.assert_allclose(means[leaf].array, exact_mean(gradients[leaf]), atol=1e-6, rtol=0, err_msg=leaf)


@pytest.mark.parametrize("name", MESHES)
def test_every_device_holds_the_same_bits(name: str):
    mesh = mesh_of(name)
    gradients = gradients_on(mesh, LEAVES)
    for leaf, mean in compiled(mesh, gradients)(gradients).items():
        if mean is None:
            continue
        seen: dict[str, bytes] = {}
        for shard in mean.array.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            assert seen.setdefault(str(shard.index), bits) == bits, f"{leaf} differs on {shard.device}"


@pytest.mark.parametrize("name", MESHES)
def test_means_lie_as_the_outer_parameters_do(name: str):
    mesh = mesh_of(name)
    means = compiled(mesh, gradients := gradients_on(mesh, LEAVES))(gradients)
    for leaf, axes in LEAVES.items():
        expected = NamedSharding(mesh, pspec_for_axis([axis.name for axis in axes], MAPPING))
        assert means[leaf].array.sharding.is_equivalent_to(expected, len(axes)), leaf


@pytest.mark.parametrize("islands_per_slot", [1, 2])
@pytest.mark.parametrize("name", MESHES)
def test_islands_exchange_the_fragment_once_and_nothing_else(name: str, islands_per_slot: int):
    mesh = mesh_of(name)
    gradients = gradients_on(mesh, LEAVES, islands_per_slot)
    crossing = between_islands(compiled(mesh, gradients).as_text(), mesh)
    if mesh.shape["diloco"] == 1:
        assert crossing == []
        return
    assert {collective.kind for collective in crossing} == {"all-reduce"}
    per_island = mesh.size // mesh.shape["diloco"]
    for collective in crossing:
        # Each device talks to those at its own place in the other islands.
        assert sorted(map(sorted, collective.groups)) == [
            list(range(place, mesh.size, per_island)) for place in range(per_island)
        ]
    sent = per_island * (sum(collective.sent for collective in crossing) - weights_bytes(gradients))
    assert 0 <= sent - fragment_bytes(gradients) <= padding_bytes(mesh, gradients)


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaf_is_sent_once_however_it_is_replicated(leaf: str):
    mesh = mesh_of("2 islands x 2 data x 2 model")
    gradients = gradients_on(mesh, {leaf: LEAVES[leaf]})
    crossing = between_islands(compiled(mesh, gradients).as_text(), mesh)
    sent = 4 * (sum(c.sent for c in crossing) - weights_bytes(gradients))
    # Padded: 35 elements are cut among 4 copies as 9 each, a shard of 3 among 2 as 2 each, one among 4 as 1 each.
    exact = {"odd": 4 * 36, "tensor": 4 * 8, "scalar": 4 * 4, "single": 4 * 4}
    assert sent == exact.get(leaf, fragment_bytes(gradients))


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(["2 islands x 4 data", "2 islands x 2 data x 2 model", "4 islands x 2 data"]),
    st.lists(st.lists(st.sampled_from(["embed", "mlp", "a", "b"]), max_size=3, unique=True), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 2),
)
def test_every_element_is_averaged_for_leaves_of_any_shape(
    name: str, axes: list[list[str]], a: int, b: int, islands_per_slot: int
):
    sizes = {"embed": 4, "mlp": 2, "a": a, "b": b}
    mesh = mesh_of(name)
    leaves = {str(i): tuple(Axis(axis, sizes[axis]) for axis in names) for i, names in enumerate(axes)}
    gradients = gradients_on(mesh, leaves, islands_per_slot)
    program = compiled(mesh, gradients)
    means = program(gradients)
    for leaf in leaves:
        np.testing.assert_allclose(means[leaf].array, exact_mean(gradients[leaf]), atol=1e-6, rtol=0)
    per_island = mesh.size // mesh.shape["diloco"]
    crossing = between_islands(program.as_text(), mesh)
    sent = per_island * (sum(c.sent for c in crossing) - weights_bytes(gradients))
    assert 0 <= sent - fragment_bytes(gradients) <= padding_bytes(mesh, gradients)


LOSSY = [name for name in wire_names() if name != "f32"]

BOUND = {"bf16": 2.0**-8, "int8": 0.5 / 127, "int4": 0.5 / 7, "e3m0": 0.34}
"""Largest error of one element, of the largest magnitude in its block."""


@pytest.mark.parametrize("wire", LOSSY)
@pytest.mark.parametrize("name", ["2 islands x 2 data x 2 model", "8 islands of 1 device", "1 island x 8 data"])
def test_wire_is_the_mean_within_its_error_and_the_same_everywhere(name: str, wire: str):
    mesh = mesh_of(name)
    gradients = gradients_on(mesh, LEAVES, islands_per_slot=2)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradients))
    for leaf, mean in compiled(mesh, gradients, wire_format(wire, 4, False))(gradients).items():
        if mean is None:
            continue
        bound = BOUND[wire] * largest + 1e-6
        np.testing.assert_allclose(mean.array, exact_mean(gradients[leaf]), atol=bound, rtol=0, err_msg=leaf)
        seen: dict[str, bytes] = {}
        for shard in mean.array.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            assert seen.setdefault(str(shard.index), bits) == bits, f"{leaf} differs on {shard.device}"


@pytest.mark.parametrize(("wire", "kind"), [("e3m0", "all-gather"), ("int8", "all-to-all")])
def test_bytes_on_the_wire_are_the_payload(wire: str, kind: str):
    # 8 islands: 4 bits are gathered; 8 bits are scattered, and the f32 means of the shares gathered.
    mesh = mesh_of("8 islands of 1 device")
    gradients = gradients_on(mesh, LEAVES)
    all_reduce = AllReduce(mesh, MAPPING, wire_format(wire, 64, False))
    crossing = between_islands(compiled(mesh, gradients, all_reduce.wire).as_text(), mesh)
    assert kind in {collective.kind for collective in crossing}
    sent = sum(one.sent // (8 if one.kind == "all-gather" else 1) for one in crossing)
    assert sent - weights_bytes(gradients) == all_reduce.payload_bytes(gradients)
    if wire == "e3m0":
        # Small leaves are joined: 24 + 6 + 48 + 12 + 35 + 1 + 1 elements in 2 blocks, of 32 bytes and a scale each.
        assert sent - weights_bytes(gradients) == 2 * 36


def test_payload_by_hand():
    # A leaf on 4 devices in shards of 6 elements: a block of 8 on each, 4 bytes of codes and 4 of scale, twice.
    mesh = mesh_of("2 islands x 4 data")
    gradients = gradients_on(mesh, {"sharded": (Row, Embed)})
    assert AllReduce(mesh, MAPPING, wire_format("int4", 8, False)).payload_bytes(gradients) == 4 * 8
    assert AllReduce(mesh, MAPPING, wire_format("int4", 8, False), num_pieces=2).payload_bytes(gradients) == 2 * 4 * 8
    assert AllReduce(mesh, MAPPING, F32(2)).payload_bytes(gradients) == 4 * 24


@pytest.mark.parametrize("wire", ["int8", "e3m0"])
def test_scattering_changes_no_bit(wire: str, monkeypatch: pytest.MonkeyPatch):
    mesh = mesh_of("8 islands of 1 device")
    gradients = gradients_on(mesh, LEAVES)
    results = []
    for scatters in (True, False):
        monkeypatch.setattr(VectorMean, "scatters", lambda self, slots, on_slot, scatters=scatters: scatters)
        results.append(compiled(mesh, gradients, wire_format(wire, 4, True))(gradients))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-7)


def test_islands_that_share_a_device_get_what_they_would_get_apart():
    apart = mesh_of("8 islands of 1 device")
    shared = Mesh(np.array(jax.devices()[:4]).reshape(4, 1, 1), ("diloco", "data", "model"))
    means = []
    for mesh, per_slot in ((apart, 1), (shared, 2)):
        gradients = gradients_on(mesh, LEAVES, per_slot)
        means.append(compiled(mesh, gradients, wire_format("int4", 4, False))(gradients))
    for a, b in zip(*map(jax.tree.leaves, means), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-7)


@pytest.mark.parametrize("num_pieces", [2, 3, 5])
@pytest.mark.parametrize("name", ["2 islands x 2 data x 2 model", "8 islands of 1 device"])
def test_pieces_are_the_whole_bit_for_bit(name: str, num_pieces: int):
    mesh = mesh_of(name)
    gradients = gradients_on(mesh, LEAVES)
    whole = compiled(mesh, gradients)(gradients)
    all_reduce = AllReduce(mesh, MAPPING, F32(2), num_pieces)
    weights = alike(gradients)
    cross = jax.jit(lambda so_far, piece: all_reduce.mean(gradients, weights, jax.random.key(0), piece, so_far).mean)
    so_far = jax.tree.map(jnp.zeros_like, whole)
    untouched = sum(np.sum(x == 0) for x in jax.tree.leaves(so_far))
    for piece in range(num_pieces):
        so_far = cross(so_far, piece)
        left = sum(np.sum(x == 0) for x in jax.tree.leaves(so_far))
        assert left < untouched
        untouched = left
    assert cache_sizes(cross)[0] <= 2  # the first buffer is placed anew, the piece is traced
    for a, b in zip(jax.tree.leaves(so_far), jax.tree.leaves(whole), strict=True):
        assert np.array_equal(a, b)
    crossing = between_islands(cross.lower(so_far, 0).compile().as_text(), mesh)
    sent = sum(c.sent for c in crossing) - weights_bytes(gradients)
    per_island = mesh.size // mesh.shape["diloco"]
    padding = per_island * len(LEAVES) * 4
    assert per_island * sent <= fragment_bytes(gradients) / num_pieces + padding


@pytest.mark.parametrize("num_pieces", [1, 3])
def test_error_feedback_loses_nothing_in_the_long_run(num_pieces: int):
    # The same gradient again and again: what has been sent in all is off by one error, not by one each time.
    mesh = mesh_of("2 islands x 2 data x 2 model")
    gradients = gradients_on(mesh, LEAVES)
    all_reduce = AllReduce(mesh, MAPPING, wire_format("int4", 4, False), num_pieces)
    residual = jax.tree.map(jnp.zeros_like, gradients)
    zeros = jax.tree.map(jnp.zeros_like, outer_gradient(gradients))
    total = jax.tree.map(jnp.zeros_like, zeros)
    cross = jax.jit(lambda *args: all_reduce.mean(gradients, alike(gradients), jax.random.key(0), *args))
    rounds = 8
    for _ in range(rounds):
        so_far = zeros
        for piece in range(num_pieces):
            so_far, _, residual = cross(piece, so_far, residual)
        total = jax.tree.map(jnp.add, total, so_far)
    # Leaves that are replicated alike share blocks, so the largest element of all counts.
    bound = 2 * BOUND["int4"] * max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradients)) + 1e-5
    for leaf in LEAVES:
        expected = rounds * exact_mean(gradients[leaf])
        np.testing.assert_allclose(total[leaf].array, expected, atol=bound, rtol=0, err_msg=leaf)
        lost = np.asarray(residual[leaf].array, np.float64).mean(0)
        np.testing.assert_allclose(total[leaf].array + lost, expected, atol=1e-5, rtol=0, err_msg=leaf)


@pytest.mark.parametrize("wire", LOSSY)
def test_an_island_that_is_not_finite_surfaces(wire: str):
    mesh = mesh_of("2 islands x 4 data")
    gradients = gradients_on(mesh, {"replicated": LEAVES["replicated"]})
    bad = gradients["replicated"].array.at[1, 3].set(jnp.nan)
    means = compiled(mesh, gradients, wire_format(wire, 4, False))(
        {
            "replicated": NamedArray(jax.device_put(bad, gradients["replicated"].array.sharding), ("diloco", "head")),
            "frozen": None,
        }
    )
    assert np.isnan(means["replicated"].array[3])
    assert np.isfinite(means["replicated"].array[8:]).all()
