"""Exact counts of bytes in a state: two words of 32 bits, as jax has no 64 here and f32 rounds from 2^24 on."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

Words = UInt32[Array, "2"]
"""A count modulo 2^64: its low and its high word."""


def words_of(count: int) -> Words:
    """Returns a count as a state holds it."""
    return jnp.asarray(np.array([count % 2**32, count // 2**32], np.uint32))


def count_of(words: Words) -> int:
    """Reads a count; the inverse of `words_of`."""
    low, high = np.asarray(words).tolist()
    return high * 2**32 + low


def added(words: Words, more: Words) -> Words:
    """Returns the sum of two counts."""
    low = words[0] + more[0]  # modulo 2^32: it is below either summand where it has wrapped around
    return jnp.stack([low, words[1] + more[1] + (low < more[0]).astype(jnp.uint32)])
