"""The all-reduce of outer gradients over the mesh axis `diloco`."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.partitioning import ResourceMapping, pspec_for_axis
from haliax.types import IntScalar
from haliax.util import is_named_array
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray

from ..algorithm.wire import WireFormat
from ..axes import ISLAND, Params
from .buckets import Bucket, buckets_of, put_all, share_spec
from .vector_mean import VectorMean, where_taken


class Reduced(NamedTuple):
    """What a reduce leaves behind."""

    mean: Params
    """Delta as far as it has crossed, axes `{...}`, f32, the same bits on every island, or each slot's share of it."""

    weights: Float[Array, " K"]
    """Of all islands, as each one gave its own; the same on every device."""

    residual: Params | None
    """What the wire format has lost so far, axes `{diloco, ...}`, f32, each island's own; for error feedback."""


class _Leaves[T](NamedTuple):
    """What a fragment's all-reduce reads, leaf by leaf: arrays, inside the manual map a device's shards, or specs."""

    gradients: list[T]
    so_far: list[T] | None
    residual: list[T] | None


@dataclass(frozen=True)
class AllReduce:
    """`outer.outer_gradient` on the mesh: every element crosses between islands exactly once.

    A fully manual shard_map over the parameters' own shards; a `Bucket` says what each device sends. On f32 it is an
    all-reduce in one. Any other format is encoded island by island, so that islands that share devices get what they
    would get apart; it crosses as integers, which no backend widens, and is added up in f32, in one order everywhere.
    """

    mesh: Mesh
    """Its axis `diloco` has one slot or more; each holds K / slots islands."""

    mapping: ResourceMapping
    """Logical to mesh axes, `diloco` included."""

    wire: WireFormat

    num_pieces: int = 1
    """Pieces in which a fragment crosses, one a call."""

    sharded: bool = False
    """Whether every slot gets its share of the mean alone, as `buckets.share_axis` splits a leaf, and all of a leaf
    that it cannot split."""

    @property
    def vectors(self) -> VectorMean:
        """The mean of what each bucket sends."""
        return VectorMean(self.mesh, self.wire)

    def mean(
        self,
        gradients: Params,
        weights: Float[Array, " K"],
        key: PRNGKeyArray,
        piece: IntScalar = 0,
        so_far: Params | None = None,
        residual: Params | None = None,
    ) -> Reduced:
        """Takes the weighted mean of one piece of a fragment; 0 where no island takes part.

        Args:
            gradients: Delta_k, axes `{diloco, ...}`, f32, sharded by `mapping`.
            weights: Each island's own, on the island or everywhere; one that is not above 0 leaves it out, whatever
                its gradient holds.
            key: For stochastic rounding; equal everywhere.
            piece: Number of the piece, may be traced.
            so_far: The mean of the pieces before, axes `{...}`; needed where there are several.
            residual: What earlier messages of these elements have lost; it is sent along, and stays for an island
                that is left out.
        """
        leaves, treedef = jax.tree.flatten(gradients, is_leaf=is_named_array)
        # By shapes alone: every device comes to the same buckets without asking another.
        buckets = self._buckets(leaves)

        def on_device(
            shards: _Leaves[Array], weights: Float[Array, " islands"], key: PRNGKeyArray, piece: IntScalar
        ) -> tuple[list[Array], Float[Array, " K"], list[Array] | None]:
            return self._mean_on_device(buckets, shards, weights, key, piece)

        specs = [pspec_for_axis(leaf.axis_names, self.mapping) for leaf in leaves]
        outer_specs = [self._outer_spec(leaf.axes[1:]) for leaf in leaves]
        before, lost = (None if tree is None else _arrays(tree) for tree in (so_far, residual))
        lost_specs, everywhere = None if lost is None else specs, PartitionSpec()
        shard_specs = _Leaves(specs, None if before is None else outer_specs, lost_specs)
        # Nothing inside is differentiated, and the replication checker cannot see that the islands agree.
        mapped = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(shard_specs, PartitionSpec(ISLAND), everywhere, everywhere),
            out_specs=(outer_specs, everywhere, lost_specs),
            check_vma=False,
        )
        shards = _Leaves(_arrays(gradients), before, lost)
        mean, everyone, lost = mapped(shards, jnp.asarray(weights), key, jnp.asarray(piece))

        def named(arrays: list[Array], start: int) -> Params:
            pairs = zip(arrays, leaves, strict=True)
            return treedef.unflatten([NamedArray(x, leaf.axis_names[start:]) for x, leaf in pairs])

        return Reduced(named(mean, 1), everyone, None if lost is None else named(lost, 0))

    def payload_bytes(self, gradients: Params) -> int:
        """Bytes that an island hands to the network for one fragment, in all of its pieces.

        Counts every island as one that is apart, whatever devices they share here; and, where the mean is spread,
        the shares of the new outer parameters, in which all of it crosses after the outer step.

        Args:
            gradients: As for `mean`; shapes will do.
        """
        leaves = jax.tree.leaves(gradients, is_leaf=is_named_array)
        num_islands, devices = leaves[0].axes[0].size, self.mesh.size // self.mesh.shape[ISLAND]
        # Replicated leaves count once: a bucket cuts them among their copies.
        if self.wire.lossless:
            return sum(leaf.size // num_islands for leaf in leaves) * 4
        sent = 0
        for bucket in self._buckets(leaves):
            blocks = self.vectors.num_blocks(bucket.length, bucket.num_shares, num_islands, 1)
            sent += bucket.num_shares * blocks * self.wire.block_bytes
            if bucket.num_shares > 1:
                sent += bucket.num_shares * bucket.length // num_islands * 4
            elif self.vectors.scatters(num_islands, 1):
                sent += blocks // num_islands * self.wire.block * 4
        return sent * self.num_pieces * devices

    def _mean_on_device(
        self,
        buckets: list[Bucket],
        shards: _Leaves[Array],
        weights: Float[Array, " islands"],
        key: PRNGKeyArray,
        piece: IntScalar,
    ) -> tuple[list[Array], Float[Array, " K"], list[Array] | None]:
        """What one device does: sends its part of each bucket, and puts the means where the leaves lie."""
        sent = [bucket.take(shards.gradients, piece) for bucket in buckets]
        carried = None if shards.residual is None else [bucket.take(shards.residual, piece) for bucket in buckets]
        if carried is not None:
            sent = [x + more for x, more in zip(sent, carried, strict=True)]
        everyone = self.vectors.of_everyone(weights)
        means, arrived = self.vectors.mean(sent, weights, everyone, key)
        before = shards.gradients if shards.so_far is None else [x[None] for x in shards.so_far]
        shares = [bucket.share for bucket in buckets]
        mean = [x[0] for x in put_all(shares, before, piece, [x[None] for x in means])]
        lost = shards.residual
        if lost is not None and carried is not None:
            # Error feedback: the difference to what has arrived goes with the next message; who is left out sent none.
            sums = zip(sent, arrived, carried, strict=True)
            lost = put_all(buckets, lost, piece, [where_taken(weights, x - own, more) for x, own, more in sums])
        return mean, everyone, lost

    def _outer_spec(self, axes: tuple[Axis, ...]) -> PartitionSpec:
        if self.sharded:
            return share_spec(axes, self.mesh, self.mapping)
        return pspec_for_axis(axes, self.mapping)

    def _buckets(self, leaves: list[NamedArray]) -> list[Bucket]:
        outer = [leaf.axes[1:] for leaf in leaves]
        return list(buckets_of(outer, self.mesh, self.mapping, self.num_pieces, self.sharded))


def _arrays(tree: Params) -> list[Array]:
    return [x.array for x in jax.tree.leaves(tree, is_leaf=is_named_array)]
