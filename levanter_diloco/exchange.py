"""The one place where islands talk: the mean of their outer gradients over the mesh axis `diloco`."""

from math import prod

import jax
import jax.numpy as jnp
from haliax import NamedArray
from haliax.partitioning import ResourceMapping, pspec_for_axis
from haliax.util import is_named_array
from jax.sharding import Mesh, PartitionSpec

from .fragments import Params
from .outer import ISLAND


def mean_over_islands(gradients: Params, mesh: Mesh, mapping: ResourceMapping) -> Params:
    """`outer.outer_gradient` on the mesh: every element crosses between islands exactly once.

    A fully manual shard_map over the parameters' own shards. A leaf that is replicated inside an island
    is first cut among its copies, so that an island never sends the same element twice, and is gathered
    inside the island afterwards.

    Args:
        gradients: Delta_k, axes `{diloco, ...}`, f32, sharded by `mapping`.
        mesh: A mesh whose axis `diloco` has one slot or more; each holds K / slots islands.
        mapping: Logical to mesh axes, `diloco` included.

    Returns:
        Delta, axes `{...}`, f32, the same bits on every island.
    """
    leaves, treedef = jax.tree.flatten(gradients, is_leaf=is_named_array)
    specs = [pspec_for_axis(leaf.axis_names, mapping) for leaf in leaves]
    num_islands = leaves[0].axis_size(ISLAND)

    def local_mean(shards: list[jax.Array]) -> list[jax.Array]:
        sums = [shard.sum(0) for shard in shards]  # over the islands of this slot
        for copies in {_copied_over(spec, mesh) for spec in specs}:
            group = [i for i, spec in enumerate(specs) if _copied_over(spec, mesh) == copies]
            for i, total in zip(group, _sum_once([sums[i] for i in group], copies, mesh), strict=True):
                sums[i] = total
        return [total / num_islands for total in sums]

    out_specs = [PartitionSpec(*spec[1:]) for spec in specs]
    # Nothing inside is differentiated, and the replication checker cannot see that a psum ends it.
    exchange = jax.shard_map(local_mean, mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=False)
    means = exchange([leaf.array for leaf in leaves])
    return treedef.unflatten([NamedArray(mean, leaf.axis_names[1:]) for mean, leaf in zip(means, leaves, strict=True)])


def _copied_over(spec: PartitionSpec, mesh: Mesh) -> tuple[str, ...]:
    """Mesh axes of more than one device over which an array of this spec is replicated."""
    used = {name for entry in spec if entry is not None for name in ([entry] if isinstance(entry, str) else entry)}
    return tuple(name for name in mesh.axis_names if name not in used and mesh.shape[name] > 1)


def _sum_once(shards: list[jax.Array], copies: tuple[str, ...], mesh: Mesh) -> list[jax.Array]:
    """Sums over `diloco` shards that are replicated over `copies`, each copy sending its own share."""
    if not copies:
        # Flat, because a TPU pads the last axis to 128 numbers, and the padding would cross too.
        return [jax.lax.psum(shard.ravel(), ISLAND).reshape(shard.shape) for shard in shards]
    num_copies = prod(mesh.shape[name] for name in copies)
    flat = jnp.concatenate([shard.ravel() for shard in shards])
    share = -(-flat.size // num_copies)
    padded = jnp.pad(flat, (0, share * num_copies - flat.size))
    mine = jax.lax.dynamic_slice_in_dim(padded, jax.lax.axis_index(copies) * share, share)
    total = jax.lax.all_gather(jax.lax.psum(mine, ISLAND), copies, tiled=True)[: flat.size]
    ends = [sum(shard.size for shard in shards[: i + 1]) for i in range(len(shards))]
    return [part.reshape(shard.shape) for part, shard in zip(jnp.split(total, ends[:-1]), shards, strict=True)]
