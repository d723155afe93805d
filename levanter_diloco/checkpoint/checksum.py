"""The checksum of an array: a sum over its elements, modulo 2^32, of a hash of each one's bits and position.

An element counts with its position in the whole array, so the checksum depends neither on how the array is sharded nor
on what adds it up: the devices that hold it, or a host that has read a chunk of it. An element of 64 bits counts as
two, its low and its high word, along one more axis.
"""

import functools
import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

BLOCK = 2**16
"""Elements that are added up at once on the host, so that intermediates stay in the cache."""


def sum_on_host(values: np.ndarray, start: Sequence[int], shape: Sequence[int]) -> np.uint32:
    """The part in an array's checksum of `values`, which lie at `start` in it."""
    if values.dtype.itemsize == 8:
        return sum_on_host(_words(values), [*start, 0], [*shape, 2])
    if values.size <= BLOCK:
        size = values.dtype.itemsize
        bits = np.atleast_1d(values).view(f"u{size}").astype(np.uint32)
        return _mixed(np, bits, start or (0,), shape or (1,))
    axis = int(np.argmax(values.shape))
    half = values.shape[axis] // 2
    first, second = np.split(values, [half], axis)
    later = [*start[:axis], start[axis] + half, *start[axis + 1 :]]
    both = np.array([sum_on_host(first, start, shape), sum_on_host(second, later, shape)])
    return both.sum(dtype=np.uint32)


def device_sums(x: Any, mesh: Mesh) -> UInt32[Array, " devices"]:  # Any: a jax or numpy array
    """What each device of the mesh adds up of `x`, apart from the others; of copies, one counts."""
    if isinstance(x, np.ndarray) and x.dtype.itemsize == 8:  # jax would cut them to 32 bits
        x = _words(x)
    where = getattr(x, "sharding", None)
    if not isinstance(where, NamedSharding) or where.mesh != mesh:
        x = jax.device_put(np.asarray(x), NamedSharding(mesh, PartitionSpec()))
    elif where.memory_kind == "pinned_host":  # one at a time: all at once may not fit on the devices
        x = jax.device_put(x, where.with_memory_kind("device"))
    return sums_of_shards(x, mesh, x.sharding.spec)


@functools.partial(jax.jit, static_argnums=(1, 2))
def sums_of_shards(x: Array, mesh: Mesh, spec: PartitionSpec) -> UInt32[Array, " devices"]:
    shape = x.shape
    axes = [() if names is None else (names,) if isinstance(names, str) else names for names in spec]
    axes += [()] * (x.ndim - len(axes))
    copies = tuple(name for name in mesh.axis_names if name not in itertools.chain(*axes))

    def own(shard: Array) -> UInt32[Array, "1"]:
        start: list = [jax.lax.axis_index(own) * n if own else 0 for own, n in zip(axes, shard.shape, strict=True)]
        wide = shard.dtype.itemsize == 8
        unsigned = jnp.dtype("u4" if wide else f"u{shard.dtype.itemsize}")
        bits = shard.astype(jnp.uint8) if shard.dtype == bool else jax.lax.bitcast_convert_type(shard, unsigned)
        whole = shape
        if wide:  # a bitcast to narrower elements adds an axis, the low word first
            start, whole = [*start, 0], (*shape, 2)
        value = _mixed(jnp, jnp.atleast_1d(bits.astype(jnp.uint32)), start or (0,), whole or (1,))
        # Of replicas one counts, or the sum would depend on the mesh.
        first = jax.lax.axis_index(copies) == 0 if copies else True
        return jnp.where(first, value, jnp.uint32(0))[None]

    everywhere = PartitionSpec(mesh.axis_names)
    return jax.shard_map(own, mesh=mesh, in_specs=spec, out_specs=everywhere, check_vma=False)(x)


def _words(values: np.ndarray) -> np.ndarray:
    """Elements of 64 bits as their low and high words, along a last axis."""
    return np.ascontiguousarray(values).reshape(*values.shape, 1).view("<u4")


def _mixed(xp: ModuleType, bits: Any, start: Sequence[Any], shape: Sequence[int]) -> Any:  # Any: of numpy or jax
    """Adds up a hash of each element's bits and position: a bijection of the bits, so that no single change is lost.

    Args:
        xp: numpy or jax.numpy; the same arithmetic, modulo 2^32, in both.
        bits: The elements of a block, as uint32.
        start: Where the block starts in the array.
        shape: Of the array.
    """
    position, stride = xp.zeros((1,) * bits.ndim, xp.uint32), 1
    for axis in reversed(range(bits.ndim)):
        along = xp.arange(bits.shape[axis], dtype=xp.uint32) + xp.asarray(start[axis]).astype(xp.uint32)
        along = along * xp.asarray([stride * 0x9E3779B9 % 2**32], xp.uint32)
        position = position + along.reshape([-1 if axis == other else 1 for other in range(bits.ndim)])
        stride *= shape[axis]
    x = bits ^ position
    # The finalizer of a hash of 32 bits: each step can be undone, so two bit patterns never fall together.
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x ^= x >> shift
        x *= xp.uint32(factor)
    return x.sum(dtype=xp.uint32)
