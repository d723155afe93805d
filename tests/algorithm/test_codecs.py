"""Wire formats alone: by hand, their errors' bounds, and that what is not finite surfaces."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from levanter_diloco.algorithm.codecs import as_integers, from_integers, wire_format
from levanter_diloco.algorithm.wire import register_wire, wire_names

KEY = jax.random.key(0)
LOSSY = [name for name in wire_names() if name != "f32"]
SCALED = ["int8", "int4", "e3m0"]
BLOCK = 8

STEP = {"int8": 1 / 127, "int4": 1 / 7}
"""Between neighbouring values, of the largest magnitude."""


def round_trip(name: str, values: Any, stochastic: bool = False, key: Any = KEY, block: int = BLOCK) -> np.ndarray:
    """What becomes of f32 values whose number is a multiple of the block."""
    wire = wire_format(name, block, stochastic)
    blocks = jnp.asarray(values, jnp.float32).reshape(-1, block)
    decoded = wire.decode(wire.encode(blocks, key))
    assert decoded.dtype == jnp.float32 and decoded.shape == blocks.shape
    return np.asarray(decoded).reshape(np.shape(values))


quick = settings(deadline=None, max_examples=50)
finite_blocks = arrays(np.float32, 2 * BLOCK, elements=st.floats(-(2.0**100), 2.0**100, width=32))


def test_int4_by_hand():
    # Scale 7: whole numbers are kept, halves go to the even one.
    assert round_trip("int4", [7, -7, 3, -3, 0, 1, 2.5, 3.5]).tolist() == [7, -7, 3, -3, 0, 1, 2, 4]


def test_e3m0_by_hand():
    # Scale 64: powers of two down to 1 are kept; 24 and 47 lie around 32's neighbourhood (24 to 48); below 0.5 is 0.
    values = [64, -32, 1, -1, 47, 49, 0.4, 0.6]
    assert round_trip("e3m0", values).tolist() == [64, -32, 1, -1, 32, 64, 0, 1]


def test_bf16_by_hand():
    # 8 bits of mantissa: 257 is between 256 and 258, and halfway goes to the even one.
    assert round_trip("bf16", [1, -2, 257, 0.5, 3, 0, 1e30, -1e-30])[:6].tolist() == [1, -2, 256, 0.5, 3, 0]


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("stochastic", [False, True])
def test_zeros_stay_zeros(name: str, stochastic: bool):
    assert round_trip(name, [0.0] * BLOCK, stochastic).tolist() == [0.0] * BLOCK


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_surfaces(name: str, stochastic: bool, bad: float):
    values = np.array([1, 2, bad, 4, 5, 6, 7, 8, *range(8)], np.float32)
    decoded = round_trip(name, values, stochastic)
    assert not np.isfinite(decoded[2])
    assert np.isfinite(decoded[8:]).all()  # the other block is not hurt


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("stochastic", [False, True])
def test_largest_of_a_block_is_kept(name: str, stochastic: bool):
    # One huge value takes the others of its block to the nearest step, and no block besides.
    values = np.array([1e30, 1, -1, 2, 3, 0, 1, 1, *range(8)], np.float32)
    decoded = round_trip(name, values, stochastic)
    np.testing.assert_allclose(decoded[[0, 15]], values[[0, 15]], rtol=1e-6)
    assert np.abs(decoded[1:8]).max() <= 1e30 / 64
    assert decoded[8] == 0


@pytest.mark.parametrize("name", LOSSY)
def test_subnormals_become_no_more_than_they_are(name: str):
    values = np.array([1e-45, -1e-40, 1e-39, 0, 0, 0, 0, 0], np.float32)
    assert np.abs(round_trip(name, values) - values).max() <= 1e-39


@pytest.mark.parametrize("name", STEP)
@quick
@given(finite_blocks)
def test_integers_are_off_by_half_a_step(name: str, values: np.ndarray):
    error = np.abs(round_trip(name, values) - values).reshape(-1, BLOCK)
    largest = np.abs(values).reshape(-1, BLOCK).max(1, keepdims=True)
    assert (error <= largest * STEP[name] * (0.5 + 1e-5) + 1e-37).all()


@quick
@given(finite_blocks)
def test_e3m0_is_off_by_a_third_or_below_the_least_step(values: np.ndarray):
    # Between 2^k and 2^(k+1) the middle is 1.5 * 2^k: a third of it away from either.
    error = np.abs(round_trip("e3m0", values) - values).reshape(-1, BLOCK)
    magnitudes = np.abs(values).reshape(-1, BLOCK)
    least = magnitudes.max(1, keepdims=True) / 64
    assert (error <= np.maximum(magnitudes / 3, least / 2) * (1 + 1e-5) + 1e-37).all()


@quick
@given(finite_blocks)
def test_bf16_keeps_eight_bits(values: np.ndarray):
    assert (np.abs(round_trip("bf16", values) - values) <= np.abs(values) * 2.0**-8 + 1e-37).all()


@pytest.mark.parametrize("name", LOSSY)
@quick
@given(finite_blocks)
def test_encoding_again_changes_nothing(name: str, values: np.ndarray):
    once = round_trip(name, values)
    np.testing.assert_allclose(round_trip(name, once), once, rtol=1e-6)


@pytest.mark.parametrize("name", LOSSY)
def test_stochastic_rounding_keeps_the_mean(name: str):
    # 4096 roundings of the same values: the mean is within five standard errors of at most half a step each.
    values = np.array([1.0, 0.3, -0.3, 0.02, -0.7, 0.5, 0.001, 0.9], np.float32)
    many = round_trip(name, np.tile(values, (4096, 1)), stochastic=True)
    assert len(np.unique(many[:, 1])) == 2
    np.testing.assert_allclose(many.mean(0), values, atol=5 * 0.25 / 64)


@pytest.mark.parametrize("name", LOSSY)
def test_stochastic_rounding_is_seeded(name: str):
    values = np.linspace(-1, 1, 64, dtype=np.float32)
    first, again = (round_trip(name, values, True, jax.random.key(1)) for _ in range(2))
    other = round_trip(name, values, True, jax.random.key(2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_integers_restore_every_dtype():
    codes, scales = jnp.arange(6, dtype=jnp.uint8).reshape(2, 3), jnp.array([1.5, -2.0])
    encoded = [(codes, scales), (jnp.ones(2, jnp.bfloat16),), (codes + 6, scales)]
    payload = as_integers(encoded)
    assert {width: (x.dtype.name, x.size) for width, x in payload.items()} == {
        1: ("uint8", 12),
        2: ("uint16", 2),
        4: ("uint32", 4),
    }
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), encoded)
    for a, b in zip(jax.tree.leaves(encoded), jax.tree.leaves(from_integers(payload, shapes)), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)


def test_plugin_adds_a_format():
    from levanter_diloco.algorithm.codecs import Bf16
    from levanter_diloco.algorithm.wire import _FORMATS
    from levanter_diloco.options.config import DiLoCoConfig

    with pytest.raises(
        ValueError, match=r"diloco\.wire \(half\) must be one of f32, bf16, int8, int4, e3m0; f32 works\."
    ):
        DiLoCoConfig(wire="half")
    try:

        @register_wire("half")
        class Half(Bf16):
            def encode(self, blocks: Any, key: Any) -> Any:
                return (blocks.astype(jnp.float16),)

        assert DiLoCoConfig(wire="half").wire == "half"
        assert round_trip("half", [1.0] * BLOCK).tolist() == [1.0] * BLOCK
    finally:
        del _FORMATS["half"]
