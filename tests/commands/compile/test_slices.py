"""Slices by the names that Google Cloud gives them."""

import pytest

from levanter_diloco.commands.compile.slices import Slice
from levanter_diloco.errors import SliceError


@pytest.mark.parametrize(
    ("name", "devices", "hosts", "shape"),
    [
        ("v4-8", 4, 1, (2, 2, 1)),
        ("v5p-16", 8, 2, (2, 2, 2)),
        ("v5p-128", 64, 16, (4, 4, 4)),
        ("v5p-256", 128, 32, (4, 4, 8)),
        ("v5p-384", 192, 48, (4, 4, 12)),
        ("v5p-1536", 768, 192, (8, 8, 12)),
        ("v5litepod-1", 1, 1, (1, 1, 1)),
        ("v5e-8", 8, 1, (2, 4, 1)),
        ("v5litepod-16", 16, 4, (4, 4, 1)),
        ("v6e-32", 32, 8, (4, 8, 1)),
        ("v6e-256", 256, 64, (16, 16, 1)),
        ("tpu7x-8", 8, 1, (2, 2, 1)),
        ("tpu7x-128", 128, 16, (4, 4, 4)),
    ],
)
def test_slice_has_the_shape_that_its_name_says(name: str, devices: int, hosts: int, shape: tuple) -> None:
    tpu = Slice.of(name)
    assert (tpu.devices, tpu.hosts, tpu.shape) == (devices, hosts, shape)


@pytest.mark.parametrize("name", ["v5p", "v7-8", "8", "v5lite-16"])
def test_unknown_type_lists_the_known(name: str) -> None:
    with pytest.raises(SliceError, match=r"must be a type of v4, v5p, v5litepod, v6e, tpu7x .*; v5p-128 works"):
        Slice.of(name)


@pytest.mark.parametrize(
    ("name", "works"), [("v5p-100", "v5p-64"), ("v5p-", "v5p-64"), ("v6e-2", "v6e-16"), ("v4-8192", "v4-64")]
)
def test_size_that_a_type_lacks_names_one_that_works(name: str, works: str) -> None:
    with pytest.raises(SliceError, match=rf"must have a size that .* has .*; {works} works"):
        Slice.of(name)
