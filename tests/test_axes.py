"""Axes of islands: trees with and without them."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from haliax.util import is_named_array

from levanter_diloco.axes import broadcast, island_axis, with_island, without_island

Embed, Island = Axis("embed", 3), Axis("diloco", 2)


def test_broadcast_copies_every_array_onto_a_leading_axis() -> None:
    tree = {"named": hax.arange(Embed), "raw": jnp.array(7), "text": "adam", "none": None}
    copies = broadcast(tree, Island)
    assert copies["named"].axes == (Island, Embed)
    assert copies["raw"].tolist() == [7, 7]
    assert copies["text"] == "adam" and copies["none"] is None
    assert island_axis({"first": copies["named"]}) == Island


def test_one_island_comes_out_as_it_went_in() -> None:
    tree = {"named": hax.arange(Embed), "raw": jnp.arange(4)}
    one = jax.tree.map(lambda x: x[1], broadcast(tree, Island))
    back = jax.tree.map(without_island, one, is_leaf=is_named_array)
    assert back["named"].axes == (Embed,)
    np.testing.assert_array_equal(back["named"].array, tree["named"].array)
    np.testing.assert_array_equal(back["raw"], tree["raw"])


def test_with_island_names_the_leading_axis() -> None:
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), hax.arange(Embed))  # as a map over islands leaves it
    assert with_island(stacked).axes == (Island, Embed)
    assert with_island(jnp.zeros(2)).shape == (2,)
