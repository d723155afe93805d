"""Checksums of arrays, of any sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from levanter_diloco.checkpoint.checksum import device_sums, sum_on_host


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_checksum_depends_on_no_sharding(dtype: str) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("diloco", "data", "model"))
    values = (100 * np.random.default_rng(0).normal(size=(4, 8, 4))).astype(jnp.dtype(dtype))
    expected = sum_on_host(values, (0, 0, 0), values.shape)
    for spec in [(), ("diloco", "data"), (None, ("model", "diloco")), (None, None, "model")]:
        array = jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))
        rows = np.asarray(device_sums(array, mesh))
        assert rows.sum(dtype=np.uint32) == expected, spec


def test_checksum_of_large_arrays_is_that_of_their_blocks() -> None:
    values = np.random.default_rng(0).normal(size=(3, 70, 1001)).astype(np.float32)
    parts = [sum_on_host(values[:, a : a + 7], (0, a, 0), values.shape) for a in range(0, 70, 7)]
    assert np.array(parts).sum(dtype=np.uint32) == sum_on_host(values, (0, 0, 0), values.shape)


def test_checksum_tells_any_bit_and_any_exchange() -> None:
    values = np.zeros((4, 8), np.float32)
    seen = {int(sum_on_host(values, (0, 0), values.shape))}
    for position in range(values.size):
        for bit in range(32):
            changed = values.copy()
            changed.view(np.uint32).ravel()[position] ^= np.uint32(1 << bit)
            seen.add(int(sum_on_host(changed, (0, 0), values.shape)))
    assert len(seen) == 1 + values.size * 32
    ramp = np.arange(4, dtype=np.float32)
    assert sum_on_host(ramp, (0,), (4,)) != sum_on_host(ramp[[1, 0, 2, 3]], (0,), (4,))


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64"])
def test_both_halves_of_a_wide_element_count(dtype: str):
    values = np.arange(24, dtype=dtype).reshape(4, 6)
    bits = values.view("u8")
    before = sum_on_host(values, (0, 0), values.shape)
    changed = {before}
    for bit in range(64):
        bits[2, 3] ^= np.uint64(1 << bit)
        changed.add(sum_on_host(values, (0, 0), values.shape))
        bits[2, 3] ^= np.uint64(1 << bit)
    assert len(changed) == 65


def test_wide_elements_have_one_checksum_on_devices_and_in_chunks():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    values = np.arange(24, dtype="int64").reshape(4, 6) << 30
    whole = sum_on_host(values, (0, 0), values.shape)
    assert np.asarray(device_sums(values, mesh)).sum(dtype=np.uint32) == whole
    chunks = [sum_on_host(values[i : i + 2], (i, 0), values.shape) for i in (0, 2)]
    assert np.array(chunks).sum(dtype=np.uint32) == whole
    with jax.enable_x64(True):
        sharded = jax.device_put(values, NamedSharding(mesh, PartitionSpec("data")))
        assert sharded.dtype == np.int64
        assert np.asarray(device_sums(sharded, mesh)).sum(dtype=np.uint32) == whole
