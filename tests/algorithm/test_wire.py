"""Wire formats: their names and costs."""

import pytest

from levanter_diloco.algorithm.codecs import wire_format
from levanter_diloco.algorithm.wire import BUILT_IN, wire_block_bytes

BLOCK = 8


@pytest.mark.parametrize(("name", "count"), [("f32", 32), ("bf16", 16), ("int8", 12), ("int4", 8), ("e3m0", 8)])
def test_bytes_of_a_block_by_hand(name: str, count: int):
    # 8 elements of 4, 2, 1, 1/2 bytes, and a scale of 4 bytes where there is one.
    assert wire_format(name, BLOCK, False).block_bytes == count


@pytest.mark.parametrize("block", [2, BLOCK, 256])
@pytest.mark.parametrize("name", BUILT_IN)
def test_declared_cost_is_that_of_what_the_codec_makes(name: str, block: int):
    assert wire_block_bytes(name, block) == wire_format(name, block, False).block_bytes
