"""The partition of the trainable parameters into fragments: what every partition can do."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
from haliax import Axis
from haliax.types import IntScalar
from haliax.util import is_named_array
from jax.tree_util import keystr
from jaxtyping import PyTree

from ..axes import FRAGMENT, Params
from ..errors import ModelError
from .windows import put_window, take_window


class Place(NamedTuple):
    """Where a fragment is found."""

    part: str
    index: IntScalar


@dataclass(frozen=True)
class Partition(abc.ABC):
    """P disjoint fragments that cover the trainable leaves.

    Fragments of one shape form a part, and a fragment is found by its part and its index there, which may
    be traced: one program serves a part. All methods work on parameters with and without an island axis.
    Parameters may lie in host memory: what is taken comes to the device, what is put goes where they lie.
    """

    num_fragments: int

    @property
    @abc.abstractmethod
    def parts(self) -> dict[str, int]:
        """How many fragments each part has; the parts in the order of their fragments' numbers."""

    @property
    def sharding(self) -> Mapping[str, int]:
        """Over how many devices of an island each named axis is split, for cuts that heed it; else empty."""
        return {}

    def locate(self, fragment: int) -> Place:
        """Returns the part that holds a fragment, and the fragment's index there."""
        for part, count in self.parts.items():
            if fragment < count:
                return Place(part, fragment)
            fragment -= count
        raise AssertionError("the schedule names fragments below P")

    def number(self, place: Place) -> IntScalar:
        """Returns the number of the fragment at `place`; the inverse of `locate`."""
        names = list(self.parts)
        return sum(self.parts[name] for name in names[: names.index(place.part)]) + place.index

    @abc.abstractmethod
    def check(self, params: Params) -> None:
        """Refuses a model that this partition cannot cut.

        Raises:
            ModelError: If a trainable leaf is not a NamedArray, if nothing is trainable, or if it cannot be cut.
            OptionError: If P does not fit the model, or a fragment would be empty.
        """

    @abc.abstractmethod
    def take(self, params: Params, part: str, index: IntScalar) -> Params:
        """Returns one fragment: the tree of `params`, `None` outside the fragment."""

    @abc.abstractmethod
    def put(self, params: Params, part: str, index: IntScalar, values: Params) -> Params:
        """Returns `params` with one fragment replaced by `values`, which is shaped as `take` returns it."""

    @abc.abstractmethod
    def stacked(self, params: Params, part: str) -> Params:
        """Returns all fragments of a part at once: what `take` returns, with an axis `fragment`."""

    @abc.abstractmethod
    def describe(self, params: Params, fragment: int) -> str:
        """Says in words what a fragment holds."""


def check_leaves(params: Params) -> None:
    """Refuses a model that no partition can cut.

    Raises:
        ModelError: If a trainable leaf is not a NamedArray, or if nothing is trainable.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_named_array)
    for path, leaf in leaves:
        if not is_named_array(leaf):
            raise ModelError(f"trainable leaf {keystr(path)} is a {type(leaf).__name__}; fragments need NamedArrays.")
    if not leaves:
        raise ModelError("the model has no trainable parameters: there is nothing to sync.")


def take_fragment[T: PyTree](tree: T, index: IntScalar) -> T:
    """Returns slice `index` of the fragment axis; raw arrays (an optimizer's counts) carry it first.

    The slices stand behind a barrier: fused into what reads them, they would be read after the fragment is put
    back, and XLA would copy the whole stack to keep the old values.
    """

    def take(x: PyTree) -> PyTree:
        if not is_named_array(x):
            return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
        return take_window(x, Axis(FRAGMENT, 1), index)[FRAGMENT, 0]

    return jax.lax.optimization_barrier(jax.tree.map(take, tree, is_leaf=is_named_array))


def put_fragment[T: PyTree](tree: T, index: IntScalar, values: T) -> T:
    """Returns `tree` with slice `index` of the fragment axis replaced; the inverse of `take_fragment`."""

    def put(x: PyTree, value: PyTree) -> PyTree:
        if not is_named_array(x):
            return jax.lax.dynamic_update_index_in_dim(x, value, index, axis=0)
        return put_window(x, FRAGMENT, index, value.broadcast_axis(Axis(FRAGMENT, 1)))

    return jax.tree.map(put, tree, values, is_leaf=is_named_array)
