"""Buckets: which leaves cross together, and what each device sends of them."""

import jax
import numpy as np
from haliax import Axis
from jax.sharding import Mesh

from levanter_diloco.islands.buckets import SMALL, buckets_of, share_axis

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("diloco", "data"))
MAPPING = {"diloco": "diloco", "embed": "data"}
Embed, Row, Vocab = Axis("embed", 8), Axis("row", 6), Axis("vocab", SMALL)


def test_large_leaves_cross_alone_and_small_ones_joined() -> None:
    leaves = [(Row, Embed), (Vocab, Embed), (Embed,), (Row,)]
    alone, *joined = buckets_of(leaves, MESH, MAPPING, 1, False)
    assert alone.leaves == (1,) and alone.length == SMALL * 2  # a device's quarter of the 8 columns
    assert sorted(bucket.leaves for bucket in joined) == [(0, 2), (3,)]


def test_replicated_leaf_is_cut_among_its_copies() -> None:
    (bucket,) = buckets_of([(Row,)], MESH, MAPPING, 1, False)
    assert (bucket.copies, bucket.num_copies) == (("data",), 4)
    assert bucket.length == 2  # 6 elements on 4 copies, padded: no element crosses twice


def test_pieces_and_padding() -> None:
    (bucket,) = buckets_of([(Row, Embed)], MESH, MAPPING, 5, False)
    assert bucket.length == 3  # 12 elements of a device in 5 pieces


def test_shares_lie_along_an_axis_that_the_slots_divide() -> None:
    assert share_axis((Row, Embed), MESH, MAPPING) is not None
    assert share_axis((Axis("odd", 3), Axis("odd_too", 5)), MESH, MAPPING) is None
    (bucket,) = buckets_of([(Row, Embed)], MESH, MAPPING, 1, True)
    assert bucket.num_shares == 2 and bucket.length == 6 and bucket.share.num_shares == 1
