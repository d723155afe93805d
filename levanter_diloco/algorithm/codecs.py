"""Codecs of the built-in wire formats, and how what they make is packed for the link [Streaming].

Apart from `wire` because these need jax: the options know the formats' names and costs without it.
"""

import abc
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree, UInt8

from .wire import Blocks, Encoded, WireFormat, register_wire, registered


def wire_format(name: str, block: int, stochastic: bool) -> WireFormat:
    """Returns the format `name`, which is known."""
    return registered(name)(block, stochastic)


@register_wire("f32")
@dataclass(frozen=True)
class F32(WireFormat):
    """As it is."""

    lossless = True

    def encode(self, blocks: Blocks, key: PRNGKeyArray) -> Encoded:
        return (blocks,)

    def decode(self, encoded: Encoded) -> Blocks:
        return encoded[0]


@register_wire("bf16")
@dataclass(frozen=True)
class Bf16(WireFormat):
    """The upper half of an f32: 8 bits of exponent and 7 of mantissa, no scale."""

    def encode(self, blocks: Blocks, key: PRNGKeyArray) -> Encoded:
        if not self.stochastic:
            return (blocks.astype(jnp.bfloat16),)
        bits = jax.lax.bitcast_convert_type(blocks, jnp.uint32)
        # 16 random bits below the ones that stay: a carry happens with the probability of the remainder.
        lower = jax.random.bits(key, blocks.shape, jnp.uint16).astype(jnp.uint32)
        rounded = jax.lax.bitcast_convert_type(((bits + lower) >> 16).astype(jnp.uint16), jnp.bfloat16)
        return (jnp.where(jnp.isfinite(blocks), rounded, blocks.astype(jnp.bfloat16)),)

    def decode(self, encoded: Encoded) -> Blocks:
        return encoded[0].astype(jnp.float32)


@dataclass(frozen=True)
class Scaled(WireFormat):
    """A signed code for each element, and a scale for each block."""

    reach: ClassVar[float]
    """What the largest code stands for; the scale is such that it is the largest magnitude of the block."""

    @abc.abstractmethod
    def codes(self, scaled: Blocks, noise: Blocks | float) -> Float[Array, "n block"]:
        """Signed codes of elements in [-reach, reach]; rounds up where the remainder exceeds `noise`, in [0, 1)."""

    def values(self, codes: Float[Array, "n block"]) -> Blocks:
        """What signed codes stand for."""
        return codes

    def encode(self, blocks: Blocks, key: PRNGKeyArray) -> Encoded:
        scales = jnp.max(jnp.abs(blocks), axis=1, keepdims=True) / self.reach
        scales = jnp.where(jnp.isfinite(scales), scales, jnp.nan)
        # A block of zeros has no scale, nor has one of subnormals that the backend flushes.
        scaled = jnp.where(scales > 0, jnp.clip(blocks / scales, -self.reach, self.reach), 0.0)
        noise = jax.random.uniform(key, blocks.shape) if self.stochastic else 0.5
        return self.pack(self.codes(scaled, noise)), scales[:, 0]

    def decode(self, encoded: Encoded) -> Blocks:
        packed, scales = encoded
        return self.values(self.unpack(packed)) * scales[:, None]

    @abc.abstractmethod
    def pack(self, codes: Float[Array, "n block"]) -> UInt8[Array, "n bytes"]:
        """Signed codes as bytes."""

    @abc.abstractmethod
    def unpack(self, packed: UInt8[Array, "n bytes"]) -> Float[Array, "n block"]:
        """The inverse of `pack`."""


@register_wire("int8")
@dataclass(frozen=True)
class Int8(Scaled):
    """Whole multiples of 1/127 of the block's largest magnitude."""

    reach = 127

    def codes(self, scaled: Blocks, noise: Blocks | float) -> Float[Array, "n block"]:
        if not self.stochastic:
            return jnp.round(scaled)
        return jnp.floor(scaled) + (scaled - jnp.floor(scaled) > noise)

    def pack(self, codes: Float[Array, "n block"]) -> UInt8[Array, "n bytes"]:
        return jax.lax.bitcast_convert_type(codes.astype(jnp.int8), jnp.uint8)

    def unpack(self, packed: UInt8[Array, "n bytes"]) -> Float[Array, "n block"]:
        return jax.lax.bitcast_convert_type(packed, jnp.int8).astype(jnp.float32)


@dataclass(frozen=True)
class Nibbles(Scaled):
    """Codes of 4 bits, sign and magnitude, two a byte: the first half of the block in the lower bits."""

    def pack(self, codes: Float[Array, "n block"]) -> UInt8[Array, "n bytes"]:
        nibbles = (jnp.abs(codes) + 8 * (codes < 0)).astype(jnp.uint8)
        lower, upper = jnp.split(nibbles, 2, axis=1)
        return lower | (upper << 4)

    def unpack(self, packed: UInt8[Array, "n bytes"]) -> Float[Array, "n block"]:
        nibbles = jnp.concatenate([packed & 15, packed >> 4], axis=1)
        magnitudes = (nibbles & 7).astype(jnp.float32)
        return jnp.where(nibbles & 8, -magnitudes, magnitudes)


@register_wire("int4")
@dataclass(frozen=True)
class Int4(Nibbles, Int8):
    """Whole multiples of a seventh of the block's largest magnitude."""

    reach = 7


@register_wire("e3m0")
@dataclass(frozen=True)
class E3m0(Nibbles):
    """FP4 of a sign and three bits of exponent: 0, or the block's largest magnitude over 1, 2 ... 64 [Streaming]."""

    reach = 1

    def codes(self, scaled: Blocks, noise: Blocks | float) -> Float[Array, "n block"]:
        magnitudes = jnp.abs(scaled)
        lower = sum((magnitudes >= 2.0**power for power in range(-6, 1)), start=jnp.zeros_like(magnitudes))
        # Codes are not equidistant: the remainder is measured between the two values next to it.
        below, above = self.values(lower), self.values(jnp.minimum(lower + 1, 7))
        return jnp.sign(scaled) * (lower + (magnitudes - below > noise * (above - below)))

    def values(self, codes: Float[Array, "n block"]) -> Blocks:
        magnitudes = jnp.abs(codes)
        powers = jnp.ldexp(jnp.ones_like(codes), (magnitudes - 7).astype(jnp.int32))
        return jnp.sign(codes) * jnp.where(magnitudes > 0, powers, 0.0)


def as_integers(arrays: PyTree) -> dict[int, Array]:
    """Packs arrays into one vector of unsigned integers for each width in bytes.

    Backends widen narrow floats on the wire, but no integers; and a vector is what a TPU lays out densely.
    """
    packed: dict[int, list[Array]] = {}
    for x in jax.tree.leaves(arrays):
        width = x.dtype.itemsize
        packed.setdefault(width, []).append(jax.lax.bitcast_convert_type(x, f"uint{8 * width}").reshape(-1))
    return {width: jnp.concatenate(vectors) for width, vectors in packed.items()}


def from_integers[T: PyTree](packed: dict[int, Array], shapes: T) -> T:
    """The inverse of `as_integers` for arrays of `shapes`."""
    start = dict.fromkeys(packed, 0)

    def unpack(struct: jax.ShapeDtypeStruct) -> Array:
        width = struct.dtype.itemsize
        first = start[width]
        start[width] += struct.size
        return jax.lax.bitcast_convert_type(packed[width][first : start[width]].reshape(struct.shape), struct.dtype)

    return jax.tree.map(unpack, shapes)
