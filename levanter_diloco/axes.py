"""The axes of islands and of fragments, and trees with and without them."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.util import is_named_array
from jaxtyping import PyTree

ISLAND = "diloco"
"""The named axis of islands, of size K, and the mesh axis over which they lie."""

FRAGMENT = "fragment"
"""The named axis along which fragments of one shape are stacked."""

Params = PyTree[NamedArray | None]
"""A model with `None` in place of every leaf that is not meant."""


def island_axis(tree: Params) -> Axis:
    """Returns the island axis of a tree whose named arrays all have it."""
    return jax.tree.leaves(tree, is_leaf=is_named_array)[0].resolve_axis(ISLAND)


def broadcast(tree: PyTree, Island: Axis) -> PyTree:
    """Returns every array of `tree` once for each island, on a new leading axis."""

    def copy(x: Any) -> Any:  # Any: a NamedArray, an array, or what an optimizer state holds besides
        if is_named_array(x):
            return x.broadcast_axis(Island) if eqx.is_array(x.array) else x
        return jnp.broadcast_to(x, (Island.size, *jnp.shape(x))) if eqx.is_array_like(x) else x

    return jax.tree.map(copy, tree, is_leaf=is_named_array)


def without_island(x: Any) -> Any:  # Any: NamedArray or array, here and below
    return NamedArray(x.array, x.axis_names[1:]) if is_named_array(x) else x


def with_island(x: Any) -> Any:
    return NamedArray(x.array, (ISLAND, *x.axis_names)) if is_named_array(x) else x
