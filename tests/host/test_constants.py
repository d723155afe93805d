"""Constants at trace time on a partly manual mesh, as the host's rotary embeddings compute them."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from haliax.partitioning import set_mesh
from jax.sharding import Mesh, PartitionSpec
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig

from levanter_diloco.host.constants import constants_outside_the_mesh

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("diloco", "data"))

Head, Pos = Axis("head_size", 4), Axis("position", 8)


def rotated(x: jax.Array) -> jax.Array:
    rotary = DefaultRotaryEmbeddingsConfig().build(Head)
    return rotary(hax.named(x, (Pos, Head)), hax.arange(Pos)).array


def on_islands(x: jax.Array) -> jax.Array:
    spec = PartitionSpec("diloco")
    one = jax.shard_map(
        lambda own: rotated(own[0])[None], in_specs=spec, out_specs=spec, axis_names={"diloco"}, check_vma=False
    )
    return jax.jit(one)(x)


def test_rotary_embeddings_are_those_of_one_device() -> None:
    x = jnp.arange(64.0).reshape(2, 8, 4)
    expected = jnp.stack([rotated(own) for own in x])
    with set_mesh(MESH), constants_outside_the_mesh():
        np.testing.assert_allclose(on_islands(x), expected, atol=1e-5)


def test_host_alone_cannot() -> None:
    # Once this passes without the patch, the patch can go.
    with set_mesh(MESH), pytest.raises(NotImplementedError, match="manual"):
        on_islands(jnp.ones((2, 8, 4)))


def test_function_of_jax_comes_back() -> None:
    original = jax.ensure_compile_time_eval
    with pytest.raises(RuntimeError), constants_outside_the_mesh():
        assert jax.ensure_compile_time_eval is not original
        raise RuntimeError
    assert jax.ensure_compile_time_eval is original
