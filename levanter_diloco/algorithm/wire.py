"""Wire formats: their names and costs, and how one of your own is added; jax is not needed to know them [Streaming].

A block is a run of elements that share one scale, the largest magnitude in it. What is not finite makes its
whole block NaN: it surfaces after the exchange and never vanishes. Register a subclass of `WireFormat` under a
name to make it usable as `trainer.diloco.wire`.
"""

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from jaxtyping import Array, Float, PRNGKeyArray

# Aliases of this kind are evaluated by type checkers alone, so that jax is not imported for an annotation.
type Key = PRNGKeyArray

type Encoded = tuple[Array, ...]
"""What crosses: arrays of any dtype whose leading axis is the blocks."""

type Blocks = Float[Array, "n block"]


@dataclass(frozen=True)
class WireFormat(abc.ABC):
    """Encodes f32 blocks into what crosses, and decodes it again; both run inside jit."""

    block: int
    """Elements of a block, even."""

    stochastic: bool = False
    """Round up or down at random, so that the expected value is kept; else to the nearest."""

    lossless: ClassVar[bool] = False
    """Whether f32 comes out as it went in: such a format crosses as an all-reduce, and is never encoded."""

    @abc.abstractmethod
    def encode(self, blocks: Blocks, key: Key) -> Encoded:
        """Encodes f32 `blocks`; `key` is for stochastic rounding."""

    @abc.abstractmethod
    def decode(self, encoded: Encoded) -> Blocks:
        """Returns the f32 blocks that `encoded` stands for, the same bits on every island."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on the wire, its scale included."""
        import jax
        import jax.numpy as jnp

        one = jax.ShapeDtypeStruct((1, self.block), jnp.float32)
        encoded = jax.eval_shape(self.encode, one, jax.eval_shape(lambda: jax.random.key(0)))
        return sum(x.size * x.dtype.itemsize for x in encoded)


@dataclass(frozen=True)
class Cost:
    """What a block costs on the wire."""

    element_bits: int
    scale_bytes: int = 0
    """Of the f32 scale that a block carries, where it has one."""

    def block_bytes(self, block: int) -> int:
        return self.element_bits * block // 8 + self.scale_bytes


BUILT_IN = {"f32": Cost(32), "bf16": Cost(16), "int8": Cost(8, 4), "int4": Cost(4, 4), "e3m0": Cost(4, 4)}
"""The formats that `codecs` registers. A test holds each cost against the shapes that its codec makes."""

_FORMATS: dict[str, type[WireFormat]] = {}


def register_wire[T: type[WireFormat]](name: str) -> Callable[[T], T]:
    """Makes a format known as `trainer.diloco.wire: <name>`."""

    def register(format: T) -> T:
        _FORMATS[name] = format
        return format

    return register


def registered(name: str) -> type[WireFormat]:
    """The class registered as `name`; a built-in one is there once `codecs` is imported."""
    return _FORMATS[name]


def wire_names() -> tuple[str, ...]:
    """The names of all known formats."""
    return tuple(dict.fromkeys((*BUILT_IN, *_FORMATS)))


def is_lossless(name: str) -> bool:
    """Whether the format `name` crosses as an all-reduce of f32."""
    return name == "f32" if name in BUILT_IN else registered(name).lossless


def wire_block_bytes(name: str, block: int) -> int:
    """Bytes of one block of the format `name`; only a format that is not built in needs jax to tell them."""
    return BUILT_IN[name].block_bytes(block) if name in BUILT_IN else registered(name)(block).block_bytes
