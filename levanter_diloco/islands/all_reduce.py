"""The exchange of outer gradients over the mesh axis `diloco`."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.partitioning import ResourceMapping, pspec_for_axis
from haliax.types import IntScalar
from haliax.util import is_named_array
from jax import ShapeDtypeStruct
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray

from ..algorithm.codecs import as_integers, from_integers
from ..algorithm.wire import Encoded, WireFormat
from ..axes import ISLAND, Params
from .buckets import Cut, cuts_of, put_all, share_spec


class Exchanged(NamedTuple):
    """What an exchange leaves behind."""

    mean: Params
    """Delta as far as it has crossed, axes `{...}`, f32, the same bits on every island, or each slot's share of it."""

    weights: Float[Array, " K"]
    """Of all islands, as each one gave its own; the same on every device."""

    residual: Params | None
    """What the wire format has lost so far, axes `{diloco, ...}`, f32, each island's own; for error feedback."""


@dataclass(frozen=True)
class Exchange:
    """`outer.outer_gradient` on the mesh: every element crosses between islands exactly once.

    A fully manual shard_map over the parameters' own shards; `cut` says what each device sends. On f32 the exchange
    is an all-reduce. Any other format is encoded island by island, so that islands that share devices get what they
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
    """Whether every slot gets its share of the mean alone, as `cut.share_axis` splits a leaf, and all of a leaf that
    it cannot split."""

    def mean(
        self,
        gradients: Params,
        weights: Float[Array, " K"],
        key: PRNGKeyArray,
        piece: IntScalar = 0,
        so_far: Params | None = None,
        residual: Params | None = None,
    ) -> Exchanged:
        """Takes the weighted mean of one piece of a fragment; 0 where no island takes part.

        Args:
            gradients: Delta_k, axes `{diloco, ...}`, f32, sharded by `mapping`.
            weights: Each island's own, on the island or everywhere; one that is not above 0 leaves it out, whatever
                its gradient holds.
            key: For stochastic rounding; equal everywhere.
            piece: Number of the piece, may be traced.
            so_far: The mean of the pieces before, axes `{...}`; needed where there are several.
            residual: What earlier exchanges of these elements have lost; it is sent along, and stays for an island
                that is left out.
        """
        leaves, treedef = jax.tree.flatten(gradients, is_leaf=is_named_array)
        specs = [pspec_for_axis(leaf.axis_names, self.mapping) for leaf in leaves]
        cuts = self._cuts(leaves)
        outer_specs = [self._outer_spec(leaf.axes[1:]) for leaf in leaves]

        def local(
            shards: list[Array],
            before: list[Array] | None,
            lost: list[Array] | None,
            weights: Float[Array, " islands"],
            key: PRNGKeyArray,
            piece: IntScalar,
        ) -> tuple[list[Array], Float[Array, " K"], list[Array] | None]:
            sent = [cut.take(shards, piece) for cut in cuts]
            carried = None if lost is None else [cut.take(lost, piece) for cut in cuts]
            if carried is not None:
                sent = [x + more for x, more in zip(sent, carried, strict=True)]
            everyone = self._of_everyone(weights)
            means, arrived = self._cross(sent, weights, everyone, key)
            old = shards if before is None else [x[None] for x in before]
            mean = [x[0] for x in put_all([cut.share for cut in cuts], old, piece, [x[None] for x in means])]
            if lost is not None and carried is not None:
                kept = zip(sent, arrived, carried, strict=True)
                lost = put_all(cuts, lost, piece, [_where(weights, x - own, more) for x, own, more in kept])
            return mean, everyone, lost

        before = None if so_far is None else _arrays(so_far)
        lost = None if residual is None else _arrays(residual)
        before_specs = None if before is None else outer_specs
        lost_specs = None if lost is None else specs
        everywhere = PartitionSpec()
        # Nothing inside is differentiated, and the replication checker cannot see that the islands agree.
        exchange = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(specs, before_specs, lost_specs, PartitionSpec(ISLAND), everywhere, everywhere),
            out_specs=(outer_specs, everywhere, lost_specs),
            check_vma=False,
        )
        arrays = _arrays(gradients)
        mean, everyone, lost = exchange(arrays, before, lost, jnp.asarray(weights), key, jnp.asarray(piece))

        def named(arrays: list[Array], start: int) -> Params:
            pairs = zip(arrays, leaves, strict=True)
            return treedef.unflatten([NamedArray(x, leaf.axis_names[start:]) for x, leaf in pairs])

        return Exchanged(named(mean, 1), everyone, None if lost is None else named(lost, 0))

    def payload_bytes(self, gradients: Params) -> int:
        """Bytes that an island hands to the network for one fragment, in all of its pieces.

        Counts every island as one that is apart, whatever devices they share here; and, where the mean is spread,
        the shares of the new outer parameters, in which all of it crosses after the outer step.

        Args:
            gradients: As for `mean`; shapes will do.
        """
        leaves = jax.tree.leaves(gradients, is_leaf=is_named_array)
        if self.wire.lossless:
            return sum(leaf.size // leaf.axes[0].size for leaf in leaves) * 4
        num_islands, devices = leaves[0].axes[0].size, self.mesh.size // self.mesh.shape[ISLAND]
        sent = 0
        for cut in self._cuts(leaves):
            blocks = self._num_blocks(cut.length, cut.num_shares, num_islands, 1)
            sent += cut.num_shares * blocks * self.wire.block_bytes
            if cut.num_shares > 1:
                sent += cut.num_shares * cut.length // num_islands * 4
            elif self._scatters(num_islands, 1):
                sent += blocks // num_islands * self.wire.block * 4
        return sent * self.num_pieces * devices

    def _outer_spec(self, axes: tuple[Axis, ...]) -> PartitionSpec:
        if self.sharded:
            return share_spec(axes, self.mesh, self.mapping)
        return pspec_for_axis(axes, self.mapping)

    def _cuts(self, leaves: list[NamedArray]) -> list[Cut]:
        outer = [leaf.axes[1:] for leaf in leaves]
        return list(cuts_of(outer, self.mesh, self.mapping, self.num_pieces, self.sharded))

    def _of_everyone(self, weights: Float[Array, " islands"]) -> Float[Array, " K"]:
        """The weights of all islands, from those of this slot; a sum, which joins that of a fragment on f32."""
        first = jax.lax.axis_index(ISLAND) * len(weights)
        own = jnp.zeros(len(weights) * self.mesh.shape[ISLAND], weights.dtype)
        return jax.lax.psum(jax.lax.dynamic_update_slice(own, weights, (first,)), ISLAND)

    def _cross(
        self,
        sent: list[Array],
        weights: Float[Array, " islands"],
        everyone: Float[Array, " K"],
        key: PRNGKeyArray,
    ) -> tuple[list[Array], list[Array]]:
        """Returns the mean of each vector over all islands, and what this slot's own have become on the wire.

        Vectors have axes `islands shares length`; of several shares a slot gets its own.
        """
        if self.wire.lossless:
            return [self._sum(_weighted(x, weights)) / _total(everyone) for x in sent], sent
        key = jax.random.fold_in(key, jax.lax.axis_index(self.mesh.axis_names))
        encoded = [self._encode(x, jax.random.fold_in(key, i)) for i, x in enumerate(sent)]
        decoded = [self.wire.decode(one).reshape(*x.shape[:2], -1) for one, x in zip(encoded, sent, strict=True)]
        own = [x[..., : one.shape[2]] for x, one in zip(decoded, sent, strict=True)]
        means = list(own)
        for split in (False, True):
            group = [i for i, x in enumerate(sent) if (x.shape[1] > 1) == split]
            arrived = self._decoded_means([encoded[i] for i in group], everyone, split) if group else []
            for i, mean in zip(group, arrived, strict=True):
                means[i] = mean[None, : sent[i].shape[2]]
        return means, own

    def _sum(self, x: Float[Array, "shares length"]) -> Float[Array, "1 length"]:
        if len(x) == 1:
            return jax.lax.psum(x, ISLAND)
        return jax.lax.psum_scatter(x, ISLAND, tiled=True)

    def _decoded_means(self, encoded: list[Encoded], everyone: Float[Array, " K"], split: bool) -> list[Array]:
        slots = self.mesh.shape[ISLAND]
        on_slot = len(everyone) // slots
        chunks = slots if split or self._scatters(slots, on_slot) else 1

        def chunked(x: Array) -> Array:
            return x.reshape(on_slot, chunks, -1, *x.shape[1:]).swapaxes(0, 1).reshape(chunks, -1, *x.shape[1:])

        parts = jax.tree.map(chunked, encoded)
        payload = jax.vmap(as_integers)(parts)
        if chunks == 1:
            payload = jax.lax.all_gather(payload, ISLAND, tiled=True)
        else:
            payload = jax.lax.all_to_all(payload, ISLAND, 0, 0, tiled=True)
        shapes = jax.tree.map(lambda x: ShapeDtypeStruct(x.shape[1:], x.dtype), parts)
        islands = jax.vmap(lambda row: [self.wire.decode(one) for one in from_integers(row, shapes)])(payload)
        means = [_weighted(x.reshape(len(everyone), -1), everyone) / _total(everyone) for x in islands]
        if chunks > 1 and not split:
            whole = jax.lax.all_gather(jnp.concatenate(means), ISLAND)
            ends = [sum(len(mean) for mean in means[: i + 1]) for i in range(len(means))]
            means = [part.reshape(-1) for part in jnp.split(whole, ends[:-1], axis=1)]
        return means

    def _encode(self, x: Float[Array, "islands shares length"], key: PRNGKeyArray) -> Encoded:
        on_slot, shares, length = x.shape
        block = self.wire.block
        blocks = self._num_blocks(length, shares, self.mesh.shape[ISLAND], on_slot)
        padded = jnp.pad(x, ((0, 0), (0, 0), (0, blocks * block - length)))
        return self.wire.encode(padded.reshape(-1, block), key)

    def _num_blocks(self, length: int, shares: int, slots: int, on_slot: int) -> int:
        """Blocks of a share of `length` elements; where there is but one, they are scattered themselves."""
        blocks = -(-length // self.wire.block)
        return -(-blocks // slots) * slots if shares == 1 and self._scatters(slots, on_slot) else blocks

    def _scatters(self, slots: int, on_slot: int) -> bool:
        """Whether every slot adds up a share of the blocks and hands out the mean, instead of all of everything.

        With w bytes an element on the wire a slot receives `(S-1)*w` bytes of it when all is gathered, and
        `(S-1)/S * (w + 4)` when shares are scattered and their f32 means gathered: less once `(S-1)*w > 4`, which
        is from 4 slots on for bf16, 5 for int8, 9 for 4 bits. The values are the same.
        """
        return (slots - 1) * on_slot * self.wire.block_bytes > 4 * self.wire.block


def _weighted(x: Float[Array, "islands ..."], weights: Float[Array, " islands"]) -> Float[Array, "..."]:
    """The weighted sum over islands; one that is left out counts for nothing, though it be infinite or NaN."""
    return _where(weights, x * jnp.expand_dims(weights, range(1, x.ndim)), jnp.zeros_like(x)).sum(0)


def _total(weights: Float[Array, " K"]) -> Float[Array, ""]:
    """What a weighted sum is divided by; 1 where all are left out, and their sum is 0."""
    total = jnp.maximum(weights, 0).sum()
    return jnp.where(total > 0, total, 1)


def _where(weights: Float[Array, " islands"], taken: Array, left: Array) -> Array:
    return jnp.where(jnp.expand_dims(weights > 0, range(1, taken.ndim)), taken, left)


def _arrays(tree: Params) -> list[Array]:
    return [x.array for x in jax.tree.leaves(tree, is_leaf=is_named_array)]
