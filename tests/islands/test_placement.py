"""Shares of the outer parameters: who has which, what crosses for them, and what they are together."""

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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from levanter_diloco.algorithm.codecs import wire_format
from levanter_diloco.algorithm.outer import outer_gradient
from levanter_diloco.commands.compile.hlo import Program, collectives
from levanter_diloco.errors import OptionError
from levanter_diloco.islands.all_reduce import AllReduce
from levanter_diloco.islands.buckets import share_axis, share_spec
from levanter_diloco.islands.placement import Placement

MAPPING = {"embed": "data", "diloco": "diloco"}
Embed, Row, Head, Odd = Axis("embed", 16), Axis("row", 6), Axis("head", 8), Axis("odd", 3)
LEAVES = {"weight": (Row, Embed), "norm": (Head,), "bias": (Odd,), "joined": (Odd, Head)}


def mesh_of(**sizes: int) -> Mesh:
    count = prod(sizes.values())
    return Mesh(np.array(jax.devices()[:count]).reshape(tuple(sizes.values())), tuple(sizes))


MESHES = {
    "2 islands x 2 data x 2 model": mesh_of(diloco=2, data=2, model=2),
    "4 islands x 2 data": mesh_of(diloco=4, data=2),
    "2 slots of 2 islands": mesh_of(diloco=2, data=2),
}


def gradients_on(name: str) -> dict[str, NamedArray]:
    mesh = MESHES[name]
    Island = Axis("diloco", 4 if "4" in name or "2 slots" in name else 2)
    random = np.random.default_rng(0)

    def leaf(axes: tuple[Axis, ...]) -> NamedArray:
        values = jnp.asarray(random.normal(size=[axis.size for axis in (Island, *axes)]), jnp.float32)
        where = NamedSharding(mesh, pspec_for_axis((Island, *axes), MAPPING))
        return hax.named(jax.device_put(values, where), (Island, *axes))

    return {leaf_name: leaf(axes) for leaf_name, axes in LEAVES.items()}


def alike(gradients: Any) -> jax.Array:
    """Equal weights of all islands."""
    return jnp.ones(gradients["weight"].axes[0].size)


def crossed(all_reduce: AllReduce, gradients: Any) -> tuple[Any, Any]:
    """The mean once all pieces have crossed, and what the wire has lost of it."""
    cross = jax.jit(lambda *args: all_reduce.mean(gradients, alike(gradients), jax.random.key(0), *args))
    mean = jax.tree.map(jnp.zeros_like, outer_gradient(gradients))
    lost = jax.tree.map(jnp.zeros_like, gradients)
    for piece in range(all_reduce.num_pieces):
        mean, _, lost = cross(piece, mean, lost)
    return mean, lost


def test_share_is_of_the_first_axis_that_slots_divide():
    # weight: 6 rows do not go into 4, an embed of 16 has shards of 8; the axis `fragment` is never split
    mesh = MESHES["4 islands x 2 data"]
    assert share_axis((Row, Embed), mesh, MAPPING) == 1
    assert share_axis((Odd,), mesh, MAPPING) is None
    assert share_axis((Axis("fragment", 4), Row, Embed), mesh, MAPPING) == 2
    assert share_spec((Row, Embed), mesh, MAPPING) == PartitionSpec(None, ("data", "diloco"))
    assert share_spec((Odd, Head), mesh, MAPPING) == PartitionSpec(None, "diloco")
    assert share_spec((Odd,), mesh, MAPPING) == PartitionSpec(None)


@pytest.mark.parametrize("num_pieces", [1, 3])
@pytest.mark.parametrize("name", MESHES)
def test_shares_of_the_mean_are_the_mean_bit_for_bit(name: str, num_pieces: int):
    mesh, gradients = MESHES[name], gradients_on(name)
    wire = wire_format("f32", 2, False)
    whole, _ = crossed(AllReduce(mesh, MAPPING, wire, num_pieces), gradients)
    shares, _ = crossed(AllReduce(mesh, MAPPING, wire, num_pieces, sharded=True), gradients)
    slots = mesh.shape["diloco"]
    for leaf, axes in LEAVES.items():
        split = 1 if share_axis(axes, mesh, MAPPING) is None else slots
        on_device = [x.addressable_shards[0].data.size for x in (shares[leaf].array, whole[leaf].array)]
        assert on_device[0] * split == on_device[1], leaf
        np.testing.assert_array_equal(shares[leaf].array, whole[leaf].array, err_msg=leaf)


@pytest.mark.parametrize("num_pieces", [1, 3])
@pytest.mark.parametrize("wire", ["bf16", "int8", "e3m0"])
@pytest.mark.parametrize("name", MESHES)
def test_shares_on_a_lossy_wire_lose_what_the_residual_keeps(name: str, wire: str, num_pieces: int):
    gradients = gradients_on(name)
    all_reduce = AllReduce(MESHES[name], MAPPING, wire_format(wire, 4, False), num_pieces, sharded=True)
    shares, lost = crossed(all_reduce, gradients)
    lost_at_all = 0.0
    for leaf in LEAVES:
        exact = np.asarray(gradients[leaf].array, np.float64).mean(0)
        kept = np.asarray(lost[leaf].array, np.float64).mean(0)
        np.testing.assert_allclose(shares[leaf].array + kept, exact, atol=1e-6, rtol=0, err_msg=leaf)
        lost_at_all += np.abs(kept).sum()
    assert lost_at_all > 0


@pytest.mark.parametrize("name", MESHES)
def test_shares_together_are_the_whole_again(name: str):
    placement = Placement(MESHES[name], MAPPING, "sharded")
    outer = jax.tree.map(lambda x: x["diloco", 0], gradients_on(name), is_leaf=is_named_array)
    own = jax.jit(placement.own)(outer)
    again = jax.jit(placement.whole)(own)
    for leaf, axes in LEAVES.items():
        for x, spec in (
            (own[leaf].array, share_spec(axes, MESHES[name], MAPPING)),
            (again[leaf].array, pspec_for_axis(axes, MAPPING)),
        ):
            assert x.sharding.is_equivalent_to(NamedSharding(MESHES[name], spec), x.ndim)
            np.testing.assert_array_equal(x, outer[leaf].array)


def between(name: str, wire: str) -> tuple[list[tuple[str, int]], int]:
    """Collectives between islands of a mean in shares and their gather, and the payload that is counted for them."""
    mesh, gradients = MESHES[name], {"weight": gradients_on(name)["weight"]}
    all_reduce = AllReduce(mesh, MAPPING, wire_format(wire, 4, False), sharded=True)
    placement = Placement(mesh, MAPPING, "sharded")

    def sync(gradients: Any) -> Any:
        return placement.whole(all_reduce.mean(gradients, alike(gradients), jax.random.key(0)).mean)

    text = jax.jit(sync).lower(gradients).compile().as_text()
    assert text
    found = [(one.kind, one.nbytes) for one in collectives(Program.of(text)) if one.crosses(4)]
    return found, all_reduce.payload_bytes(gradients)


def test_reduce_to_shares_and_their_gather_send_what_an_all_reduce_sends():
    # 96 numbers on an island of 2 x 2 devices, which has two copies of each: a device sends a quarter, 24 numbers,
    # gets the sum of half of them, sends that half of the new parameters and gets the other.
    found, payload = between("2 islands x 2 data x 2 model", "f32")
    # And the weights of the islands.
    assert sorted(found) == sorted([("all-reduce", 2 * 4), ("reduce-scatter", 12 * 4), ("all-gather", 24 * 4)])
    assert payload == 96 * 4


def test_lossy_wire_sends_shares_of_the_new_parameters_in_f32():
    # 24 numbers a device: six blocks of 4 codes and a scale, then 12 numbers of 4 bytes.
    found, payload = between("2 islands x 2 data x 2 model", "int8")
    assert {kind for kind, _ in found} == {"all-reduce", "all-to-all", "all-gather"}
    assert sum(nbytes for kind, nbytes in found if kind == "all-to-all") == 6 * 8
    assert [nbytes for kind, nbytes in found if kind == "all-gather"] == [24 * 4]
    assert [nbytes for kind, nbytes in found if kind == "all-reduce"] == [2 * 4]
    assert payload == 4 * (6 * 8 + 12 * 4)


def test_shares_on_one_slot_are_refused():
    with pytest.raises(OptionError, match=r"outer_memory \(sharded\) must find islands on devices of their own"):
        Placement(mesh_of(diloco=1, data=8), MAPPING, "sharded").check()
