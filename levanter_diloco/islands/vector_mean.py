"""The mean over islands of vectors in a wire format, inside a map that is manual over all axes of the mesh."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jax.sharding import Mesh
from jaxtyping import Array, Float, PRNGKeyArray

from ..algorithm.codecs import as_integers, from_integers
from ..algorithm.wire import Encoded, WireFormat
from ..axes import ISLAND


@dataclass(frozen=True)
class VectorMean:
    """Weighted means of vectors of which every device of an island has its own."""

    mesh: Mesh
    wire: WireFormat

    def of_everyone(self, weights: Float[Array, " islands"]) -> Float[Array, " K"]:
        """The weights of all islands, from those of this slot; a sum, which joins that of a fragment on f32."""
        first = jax.lax.axis_index(ISLAND) * len(weights)
        own = jnp.zeros(len(weights) * self.mesh.shape[ISLAND], weights.dtype)
        return jax.lax.psum(jax.lax.dynamic_update_slice(own, weights, (first,)), ISLAND)

    def mean(
        self,
        sent: list[Array],
        weights: Float[Array, " islands"],
        everyone: Float[Array, " K"],
        key: PRNGKeyArray,
    ) -> tuple[list[Array], list[Array]]:
        """Returns the mean of each vector over all islands, and what this slot's own have become on the wire.

        Vectors have axes `islands shares length`; of several shares a slot gets its own.
        """
        # Nothing is lost, so nothing is carried over to the next sync either.
        if self.wire.lossless:
            return [self._sum(_weighted(x, weights)) / _total(everyone) for x in sent], sent
        # Each device rounds at random in its own way, each vector in another.
        key = jax.random.fold_in(key, jax.lax.axis_index(self.mesh.axis_names))
        encoded = [self._encode(x, jax.random.fold_in(key, i)) for i, x in enumerate(sent)]
        decoded = [self.wire.decode(one).reshape(*x.shape[:2], -1) for one, x in zip(encoded, sent, strict=True)]
        own = [x[..., : one.shape[2]] for x, one in zip(decoded, sent, strict=True)]
        means = list(own)
        # Vectors in shares and whole ones take different collectives.
        for split in (False, True):
            group = [i for i, x in enumerate(sent) if (x.shape[1] > 1) == split]
            arrived = self._decoded_means([encoded[i] for i in group], everyone, split) if group else []
            for i, mean in zip(group, arrived, strict=True):
                means[i] = mean[None, : sent[i].shape[2]]
        return means, own

    def num_blocks(self, length: int, shares: int, slots: int, on_slot: int) -> int:
        """Blocks of a share of `length` elements; where there is but one, they are scattered themselves."""
        blocks = -(-length // self.wire.block)
        return -(-blocks // slots) * slots if shares == 1 and self.scatters(slots, on_slot) else blocks

    def scatters(self, slots: int, on_slot: int) -> bool:
        """Whether every slot adds up a share of the blocks and hands out the mean, instead of all of everything.

        With w bytes an element on the wire a slot receives `(S-1)*w` bytes of it when all is gathered, and
        `(S-1)/S * (w + 4)` when shares are scattered and their f32 means gathered: less once `(S-1)*w > 4`, which
        is from 4 slots on for bf16, 5 for int8, 9 for 4 bits. The values are the same.
        """
        return (slots - 1) * on_slot * self.wire.block_bytes > 4 * self.wire.block

    def _sum(self, x: Float[Array, "shares length"]) -> Float[Array, "1 length"]:
        # Of several shares each slot needs the sum of its own alone: half of an all-reduce.
        if len(x) == 1:
            return jax.lax.psum(x, ISLAND)
        return jax.lax.psum_scatter(x, ISLAND, tiled=True)

    def _decoded_means(self, encoded: list[Encoded], everyone: Float[Array, " K"], split: bool) -> list[Array]:
        slots = self.mesh.shape[ISLAND]
        on_slot = len(everyone) // slots
        chunks = slots if split or self.scatters(slots, on_slot) else 1

        def chunked(x: Array) -> Array:
            return x.reshape(on_slot, chunks, -1, *x.shape[1:]).swapaxes(0, 1).reshape(chunks, -1, *x.shape[1:])

        # Every vector in one message, so that the wire is paid for once, whatever the number of buckets.
        parts = jax.tree.map(chunked, encoded)
        # Integers: CPU and GPU backends would widen bf16 and narrower floats before they send them.
        payload = jax.vmap(as_integers)(parts)
        if chunks == 1:
            payload = jax.lax.all_gather(payload, ISLAND, tiled=True)
        else:
            payload = jax.lax.all_to_all(payload, ISLAND, 0, 0, tiled=True)
        shapes = jax.tree.map(lambda x: ShapeDtypeStruct(x.shape[1:], x.dtype), parts)
        # Every slot decodes the same bytes and adds them up in the same order: the same bits everywhere.
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
        blocks = self.num_blocks(length, shares, self.mesh.shape[ISLAND], on_slot)
        # Zeros never raise the largest magnitude of a block, which is its scale.
        padded = jnp.pad(x, ((0, 0), (0, 0), (0, blocks * block - length)))
        return self.wire.encode(padded.reshape(-1, block), key)


def _weighted(x: Float[Array, "islands ..."], weights: Float[Array, " islands"]) -> Float[Array, "..."]:
    """The weighted sum over islands; one that is left out counts for nothing, though it be infinite or NaN."""
    return where_taken(weights, x * jnp.expand_dims(weights, range(1, x.ndim)), jnp.zeros_like(x)).sum(0)


def _total(weights: Float[Array, " K"]) -> Float[Array, ""]:
    """What a weighted sum is divided by; 1 where all are left out, and their sum is 0."""
    total = jnp.maximum(weights, 0).sum()
    return jnp.where(total > 0, total, 1)


def where_taken(weights: Float[Array, " islands"], taken: Array, left: Array) -> Array:
    return jnp.where(jnp.expand_dims(weights > 0, range(1, taken.ndim)), taken, left)
