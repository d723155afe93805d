"""Counts of bytes in two words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from levanter_diloco.islands.byte_count import added, count_of, words_of

counts = st.integers(0, 2**63 - 1)


@pytest.mark.parametrize("count", [0, 1, 2**32 - 1, 2**32, 3 * 2**40 + 5])
def test_a_count_is_read_as_it_was_written(count: int):
    words = words_of(count)
    assert words.dtype == jnp.uint32 and count_of(words) == count


def test_sum_carries_into_the_high_word():
    # In f32 2^24 + 1 would be 2^24, and in 32 bits 2^32 would be 0.
    assert count_of(added(words_of(2**32 - 1), words_of(1))) == 2**32
    assert count_of(added(words_of(2**24), words_of(1))) == 2**24 + 1


@given(counts, counts)
def test_sum_is_exact(first: int, second: int):
    both = jax.jit(added)(np.asarray(words_of(first)), np.asarray(words_of(second)))
    assert count_of(both) == first + second
