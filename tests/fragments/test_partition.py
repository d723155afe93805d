"""What every partition can do: places of fragments, and slices of the fragment axis."""

import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from levanter_diloco.errors import ModelError
from levanter_diloco.fragments.layers import LayerPartition
from levanter_diloco.fragments.partition import Place, check_leaves, put_fragment, take_fragment

Fragment, Embed = Axis("fragment", 3), Axis("embed", 2)


def test_numbers_and_places_are_inverse() -> None:
    partition = LayerPartition(5, "interleaved")
    assert [partition.locate(f) for f in range(5)] == [Place("rest", 0), *(Place("layers", i) for i in range(4))]
    assert [partition.number(partition.locate(f)) for f in range(5)] == list(range(5))


def test_slice_is_taken_and_put_back() -> None:
    tree = {"moment": hax.named(jnp.arange(6.0).reshape(3, 2), (Fragment, Embed)), "count": jnp.array([4, 5, 6])}
    one = take_fragment(tree, jnp.int32(1))
    assert one["moment"].axes == (Embed,) and one["moment"].array.tolist() == [2, 3]
    assert int(one["count"]) == 5
    new = put_fragment(tree, jnp.int32(1), {"moment": one["moment"] * 10, "count": jnp.array(9)})
    np.testing.assert_array_equal(new["moment"].array, [[0, 1], [20, 30], [4, 5]])
    assert new["count"].tolist() == [4, 9, 6]


def test_leaf_without_names_is_refused_by_its_path() -> None:
    with pytest.raises(ModelError, match=r"trainable leaf \['head'\]\['bias'\] is a .*; fragments need NamedArrays"):
        check_leaves({"head": {"bias": jnp.zeros(3)}})


def test_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match="nothing to sync"):
        check_leaves({"frozen": None})
