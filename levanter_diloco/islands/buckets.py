"""Buckets of a fragment for its all-reduce: what each device sends as one vector, piece by piece."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import jax
import jax.numpy as jnp
from haliax import Axis
from haliax.partitioning import ResourceMapping, pspec_for_axis
from haliax.types import IntScalar
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from ..axes import FRAGMENT, ISLAND

SMALL = 2**16
"""Elements of a shard below which leaves are joined: what is sent is padded, to a block and on a TPU to a tile."""


@dataclass(frozen=True)
class Bucket:
    """Leaves that cross as one vector.

    A large leaf crosses by itself, small ones are joined. Leaves that are replicated inside an island are joined
    too, and split among their copies, so that an island never sends the same element twice. Methods run in a fully
    manual shard_map, on the shards of this device with a leading axis of islands.
    """

    leaves: tuple[int, ...]
    """Which leaves of the fragment, in order."""

    shapes: tuple[tuple[int, ...], ...]
    """Of their shards, without the island axis."""

    copies: tuple[str, ...]
    """Mesh axes over which they are replicated."""

    num_copies: int
    num_pieces: int
    num_shares: int
    """Into how many equal shares the leaves are split, one for each slot of the islands; 1 if they stay whole."""

    split: tuple[int, ...]
    """Of each leaf the axis along which its shares lie; any if it stays whole."""

    @property
    def length(self) -> int:
        """Elements that a device sends of one piece of one share, padding included."""
        return -(-sum(map(prod, self.shapes)) // (self.num_shares * self.num_copies * self.num_pieces))

    @property
    def share(self) -> "Bucket":
        """The same bucket of one share alone."""
        shapes = tuple(self._share_of(*leaf) for leaf in zip(self.shapes, self.split, strict=True))
        return replace(self, shapes=shapes, num_shares=1)

    def take(self, shards: Sequence[Array], piece: IntScalar) -> Float[Array, "islands shares length"]:
        """Returns what this device sends of one piece."""
        flat = self._flat(shards)
        # Of a replicated leaf each copy sends another part.
        mine = flat[:, :, jax.lax.axis_index(self.copies)] if self.copies else flat[:, :, 0]
        return jax.lax.dynamic_slice_in_dim(mine, piece * self.length, self.length, axis=2)

    def put(
        self, shards: Sequence[Array], piece: IntScalar, values: Float[Array, "islands shares length"]
    ) -> list[Array]:
        """Returns the shards with one piece replaced by `values`, of which every device has what it would send."""
        # Inside the island again: what its copies have sent apart comes together.
        whole = jax.lax.all_gather(values, self.copies, axis=2) if self.copies else values[:, :, None]
        # With one piece the values are all there is, and the old shards need not be read.
        if self.num_pieces > 1:
            start = (0, 0, 0, piece * self.length)
            whole = jax.lax.dynamic_update_slice(self._flat(shards), whole, start)
        flat = whole.reshape(*whole.shape[:2], -1)
        ends = [sum(map(prod, self.shapes[: i + 1])) // self.num_shares for i in range(len(self.shapes))]
        parts = jnp.split(flat[..., : ends[-1]], ends[:-1], axis=2)
        return [self._joined(*part) for part in zip(parts, self.shapes, self.split, strict=True)]

    def _flat(self, shards: Sequence[Array]) -> Float[Array, "islands shares copies all_pieces"]:
        leaves = zip(self.leaves, self.shapes, self.split, strict=True)
        rows = [self._split(shards[i], shape, axis) for i, shape, axis in leaves]
        flat = rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=2)
        # So that pieces and copies have one length: a piece's number can be traced.
        padding = self.length * self.num_copies * self.num_pieces - flat.shape[2]
        padded = jnp.pad(flat, ((0, 0), (0, 0), (0, padding)))
        return padded.reshape(*flat.shape[:2], self.num_copies, -1)

    def _split(self, x: Array, shape: tuple[int, ...], axis: int) -> Float[Array, "islands shares size"]:
        share = self._share_of(shape, axis)
        x = x.reshape(len(x), *shape[:axis], self.num_shares, *share[axis:])
        return jnp.moveaxis(x, axis + 1, 1).reshape(len(x), self.num_shares, -1)

    def _joined(self, x: Float[Array, "islands shares size"], shape: tuple[int, ...], axis: int) -> Array:
        x = x.reshape(*x.shape[:2], *self._share_of(shape, axis))
        return jnp.moveaxis(x, 1, axis + 1).reshape(len(x), *shape)

    def _share_of(self, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
        return tuple(size // self.num_shares if i == axis else size for i, size in enumerate(shape))


def buckets_of(
    leaves: Sequence[tuple[Axis, ...]], mesh: Mesh, mapping: ResourceMapping, num_pieces: int, sharded: bool
) -> Iterator[Bucket]:
    """Yields the buckets of a fragment.

    Args:
        leaves: Axes of each leaf, the islands left out.
        mesh: The mesh.
        mapping: Logical to mesh axes.
        num_pieces: In how many pieces the fragment crosses.
        sharded: Whether leaves are split into shares.
    """
    specs = [pspec_for_axis(axes, mapping) for axes in leaves]
    shapes = [_shard_shape(axes, mesh, mapping) for axes in leaves]
    copies = [_copied_over(spec, mesh) for spec in specs]
    split = [share_axis(axes, mesh, mapping) if sharded else None for axes in leaves]
    kinds = [(axes, along is not None) for axes, along in zip(copies, split, strict=True)]
    # A large leaf by itself: joining it would copy it.
    alone = [i for i, axes in enumerate(copies) if not axes and prod(shapes[i]) >= SMALL]
    joined = [i for i in range(len(leaves)) if i not in alone]
    groups = [tuple(i for i in joined if kinds[i] == kind) for kind in sorted({kinds[i] for i in joined})]
    for group in [(i,) for i in alone] + groups:
        axes, is_split = kinds[group[0]]
        yield Bucket(
            leaves=group,
            shapes=tuple(shapes[i] for i in group),
            copies=axes,
            num_copies=prod(mesh.shape[name] for name in axes),
            num_pieces=num_pieces,
            num_shares=mesh.shape[ISLAND] if is_split else 1,
            split=tuple(split[i] or 0 for i in group),
        )


def put_all(buckets: list[Bucket], shards: list[Array], piece: IntScalar, values: list[Array]) -> list[Array]:
    """Returns `shards` with a piece of each bucket replaced."""
    out = list(shards)
    for bucket, value in zip(buckets, values, strict=True):
        for i, x in zip(bucket.leaves, bucket.put(shards, piece, value), strict=True):
            out[i] = x
    return out


def share_axis(axes: Sequence[Axis], mesh: Mesh, mapping: ResourceMapping) -> int | None:
    """Returns which axis of an outer parameter is split over the slots of the islands, `None` if none can be.

    It is the first whose shard on a device they divide; never the axis `fragment`, along which a fragment is found.
    """
    shard = _shard_shape(axes, mesh, mapping)
    fits = (i for i, axis in enumerate(axes) if axis.name != FRAGMENT and shard[i] % mesh.shape[ISLAND] == 0)
    return next(fits, None)


def share_spec(axes: Sequence[Axis], mesh: Mesh, mapping: ResourceMapping) -> PartitionSpec:
    """Returns the sharding of an outer parameter of which every slot has its share, as `share_axis` splits it."""
    spec = list(pspec_for_axis(axes, mapping))
    if (split := share_axis(axes, mesh, mapping)) is not None:
        inside = spec[split] or ()
        spec[split] = (*([inside] if isinstance(inside, str) else inside), ISLAND)
    return PartitionSpec(*spec)


def _shard_shape(axes: Sequence[Axis], mesh: Mesh, mapping: ResourceMapping) -> tuple[int, ...]:
    return NamedSharding(mesh, pspec_for_axis(axes, mapping)).shard_shape(tuple(axis.size for axis in axes))


def _copied_over(spec: PartitionSpec, mesh: Mesh) -> tuple[str, ...]:
    """Mesh axes of more than one device, but for the islands', over which an array of this spec is replicated."""
    used = {name for entry in spec if entry is not None for name in ([entry] if isinstance(entry, str) else entry)}
    return tuple(name for name in mesh.axis_names if name not in {*used, ISLAND} and mesh.shape[name] > 1)
