"""How a fragment is cut for an exchange: what each device sends of it, piece by piece."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from haliax.types import IntScalar
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

SMALL = 2**16
"""Elements of a shard below which leaves are joined: what is sent is padded, to a block and on a TPU to a tile."""


@dataclass(frozen=True)
class Cut:
    """Leaves that cross as one vector.

    A large leaf crosses by itself, small ones are joined. Leaves that are replicated inside an island are joined
    too, and cut among their copies, so that an island never sends the same element twice. Methods run in a fully
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

    @property
    def length(self) -> int:
        """Elements that a device sends of one piece, padding included."""
        return -(-sum(map(prod, self.shapes)) // (self.num_copies * self.num_pieces))

    def take(self, shards: Sequence[Array], piece: IntScalar) -> Float[Array, "islands length"]:
        """Returns what this device sends of one piece."""
        flat = self._flat(shards)
        mine = flat[:, jax.lax.axis_index(self.copies)] if self.copies else flat[:, 0]
        return jax.lax.dynamic_slice_in_dim(mine, piece * self.length, self.length, axis=1)

    def put(self, shards: Sequence[Array], piece: IntScalar, values: Float[Array, "islands length"]) -> list[Array]:
        """Returns the shards with one piece replaced by `values`, of which every device has what it would send."""
        whole = jax.lax.all_gather(values, self.copies, axis=1) if self.copies else values[:, None]
        if self.num_pieces > 1:
            start = (0, 0, piece * self.length)
            whole = jax.lax.dynamic_update_slice(self._flat(shards), whole, start)
        flat = whole.reshape(len(whole), -1)
        ends = [sum(map(prod, self.shapes[: i + 1])) for i in range(len(self.shapes))]
        parts = jnp.split(flat[:, : ends[-1]], ends[:-1], axis=1)
        return [part.reshape(len(whole), *shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def _flat(self, shards: Sequence[Array]) -> Float[Array, "islands copies all_pieces"]:
        rows = [shards[i].reshape(len(shards[i]), -1) for i in self.leaves]
        flat = rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=1)
        padding = self.length * self.num_copies * self.num_pieces - flat.shape[1]
        return jnp.pad(flat, ((0, 0), (0, padding))).reshape(len(flat), self.num_copies, -1)


def cuts_of(
    specs: Sequence[PartitionSpec], shapes: Sequence[tuple[int, ...]], mesh: Mesh, num_pieces: int
) -> Iterator[Cut]:
    """Yields the cuts of a fragment.

    Args:
        specs: The sharding of each leaf, whose leading axis is the islands.
        shapes: Of each leaf's shard, the islands left out.
        mesh: The mesh.
        num_pieces: In how many pieces the fragment crosses.
    """
    copies = [_copied_over(spec, mesh) for spec in specs]
    alone = [i for i, axes in enumerate(copies) if not axes and prod(shapes[i]) >= SMALL]
    joined = [i for i in range(len(specs)) if i not in alone]
    groups = [tuple(i for i in joined if copies[i] == axes) for axes in sorted({copies[i] for i in joined})]
    for leaves in [(i,) for i in alone] + groups:
        axes = copies[leaves[0]]
        count = prod(mesh.shape[name] for name in axes)
        yield Cut(leaves, tuple(shapes[i] for i in leaves), axes, count, num_pieces)


def _copied_over(spec: PartitionSpec, mesh: Mesh) -> tuple[str, ...]:
    """Mesh axes of more than one device over which an array of this spec is replicated."""
    used = {name for entry in spec if entry is not None for name in ([entry] if isinstance(entry, str) else entry)}
    return tuple(name for name in mesh.axis_names if name not in used and mesh.shape[name] > 1)
