"""Syncs compiled for TPU slices, which the CPU cannot show: what lies in host memory and what crosses from there."""

import os
import re
from math import prod
from typing import Any, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis
from haliax.nn import ScanCheckpointPolicy, Stacked
from jax import ShapeDtypeStruct
from jax.experimental import topologies
from jax.sharding import Mesh
from levanter.trainer_state import TrainerState

from helpers.toy_model import Block
from levanter_diloco.algorithm.codecs import wire_format
from levanter_diloco.fragments.partition import Place
from levanter_diloco.islands.all_reduce import AllReduce
from levanter_diloco.islands.guard import Guard
from levanter_diloco.islands.layout import Layout
from levanter_diloco.islands.placement import Placement
from levanter_diloco.islands.state import DiLoCoState
from levanter_diloco.islands.sync import Sync
from levanter_diloco.options.config import DiLoCoConfig

MAPPING = {"embed": "data", "diloco": "diloco"}
Layer, Entry, Embed, Vocab = Axis("layer", 32), Axis("entry", 1024), Axis("embed", 512), Axis("vocab", 1024)


class Model(eqx.Module):
    embed: hax.NamedArray
    layers: Stacked
    norms: Stacked

    @classmethod
    def of_zeros(cls) -> "Model":
        policy = ScanCheckpointPolicy.from_bool_or_str(False)
        weight, norm = hax.zeros((Layer, Entry, Embed)), hax.zeros((Layer, Embed))
        return cls(hax.zeros((Vocab, Embed)), *(Stacked(Block(x), Layer, policy) for x in (weight, norm)))


def two_slices() -> Mesh:
    """Two slices of four chips: an island each, over whose chips `embed` is split."""
    pytest.importorskip("libtpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    shape = {"chip_config_name": "megacore", "chips_per_host_bounds": (2, 2, 1), "wrap": (False, False, False)}
    described = topologies.get_topology_desc(platform="tpu", topology_name="v5:2x2x1", num_slices=2, **shape)
    devices = sorted(described.devices, key=lambda device: (device.slice_index, device.id))
    return Mesh(np.array(devices).reshape(2, 4), ("diloco", "data"))


def compiled_sync(diloco: DiLoCoConfig, part: str) -> jax.stages.Compiled:
    """A whole sync of one fragment of `part`, its index traced."""
    placement = Placement(two_slices(), MAPPING, diloco.outer_memory)
    placement.check()
    layout, optimizer = Layout(diloco, 2, {"embed": 4}), diloco.outer.build(10)
    exchange = AllReduce(placement.mesh, MAPPING, wire_format("f32", 2, False), sharded=placement.sharded)
    sync = Sync(
        layout.partition, optimizer, 0.0, exchange, placement, optax.sgd(0.1), Guard(enabled=True, factor=None)
    )

    def fresh() -> DiLoCoState:
        host = TrainerState.init(optax.sgd(0.1), Model.of_zeros(), key=jax.random.PRNGKey(0))
        return DiLoCoState.of(host, layout, optimizer)

    shapes, static = eqx.partition(eqx.filter_eval_shape(fresh), lambda x: isinstance(x, ShapeDtypeStruct))
    leaves, treedef = jax.tree.flatten(shapes)
    where = placement.shardings(shapes)

    def apply(leaves: list, index: jax.Array) -> list:
        with hax.axis_mapping(MAPPING):
            state, _ = sync.sync(eqx.combine(treedef.unflatten(leaves), static), Place(part, index), jnp.ones(2))
        return jax.tree.leaves(eqx.filter(state, eqx.is_array))

    placed = [ShapeDtypeStruct(x.shape, x.dtype, sharding=at) for x, at in zip(leaves, where, strict=True)]
    program = jax.jit(apply, donate_argnums=0, out_shardings=where)
    return program.lower(placed, ShapeDtypeStruct((), np.int32)).compile()


@pytest.mark.slow
@pytest.mark.parametrize(("partition", "part"), [("layers", "layers"), ("balanced", "rows")])
def test_only_a_fragment_comes_from_host_memory(partition: str, part: str) -> None:
    block: dict[str, Any] = {"num_fragments": 33, "sync_period": 33, "partition": partition}
    device, host = (  # Any: each backend's own class
        cast(Any, compiled_sync(DiLoCoConfig(**block, outer_memory=memory), part).memory_analysis())
        for memory in ("device", "pinned_host")
    )
    theta = 4 * (Vocab.size + Layer.size * Entry.size + Layer.size) * Embed.size // 4  # bytes on one of four chips
    # Theta and momentum, but for the norms; the windows of `balanced` are a little more than its momentum.
    assert 1.99 * theta < host.host_argument_size_in_bytes < 2.03 * theta
    assert host.host_argument_size_in_bytes + host.argument_size_in_bytes == device.argument_size_in_bytes
    assert host.host_alias_size_in_bytes == host.host_argument_size_in_bytes
    assert host.temp_size_in_bytes - device.temp_size_in_bytes < theta / 4


@pytest.mark.slow
def test_shares_cross_once_between_slices() -> None:
    # A chip has a quarter of a layer's 1024 x 512 numbers and of its norm's 512. It sends these to be added up (the
    # norm's two shares of 64 fill rows of 128 lanes), as are the weights of the two islands, and half of as many new
    # parameters.
    block = DiLoCoConfig(num_fragments=33, sync_period=33, outer_memory="sharded")
    text = compiled_sync(block, "layers").as_text() or ""
    sends = [prod(map(int, dims.split(","))) for dims in re.findall(r"= \(f32\[([\d,]*)\].* send\(", text)]
    assert sorted(sends) == sorted([1024 * 128, 2 * 128, 128, 1024 * 128 // 2, 128 // 2])
