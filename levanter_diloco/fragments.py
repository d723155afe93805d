"""The partition of the trainable parameters into fragments.

Layers are found by container: leaves under a `haliax.nn.Stacked` carry a layer axis, and everything else
is "the rest". The layer axis is unflattened into the named axes `row` and `fragment`, so that a fragment
is one slice and its index may be traced: one program serves all layer fragments.
"""

from dataclasses import dataclass

import haliax as hax
import jax
from haliax import Axis, NamedArray
from haliax.nn import Stacked
from haliax.types import IntScalar
from haliax.util import is_named_array
from jax.tree_util import keystr
from jaxtyping import PyTree

from .config import LayerOrder
from .errors import PATH, ModelError, OptionError

FRAGMENT = "fragment"
ROW = "row"

Params = PyTree[NamedArray | None]
"""A model with `None` in place of every leaf that is not meant."""


@dataclass(frozen=True)
class Partition:
    """P disjoint fragments that cover the trainable leaves; `partition: layers` [Streaming].

    Fragment 0 is the rest, fragments 1..P-1 are equal shares of the layers. With P = 1 fragment 0 is
    everything. Methods take `index`: `None` for fragment 0, else the fragment's number minus one, which
    may be traced. They work the same on parameters with and without an island axis.
    """

    num_fragments: int
    layer_order: LayerOrder

    @property
    def Fragment(self) -> Axis | None:
        """The axis over layer fragments, of size P-1; `None` if P = 1."""
        return Axis(FRAGMENT, self.num_fragments - 1) if self.num_fragments > 1 else None

    def check(self, params: Params) -> None:
        """Refuses a model that this partition cannot cut.

        Raises:
            ModelError: If a trainable leaf is not a NamedArray, if no layers are stacked, or if nothing is trainable.
            OptionError: If P - 1 does not divide the layer count, or a fragment would be empty.
        """
        for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_named_array):
            if not is_named_array(leaf):
                raise ModelError(
                    f"trainable leaf {keystr(path)} is a {type(leaf).__name__}; fragments need NamedArrays."
                )
        layer_axes = self._layer_axes(params)
        if not layer_axes:
            raise ModelError("the model has no trainable parameters: there is nothing to sync.")
        if self.num_fragments > 1:
            self._check_layers({axis for axis in layer_axes if axis is not None})
        if None not in layer_axes:
            raise OptionError(
                f"{PATH}.num_fragments ({self.num_fragments}) leaves fragment 0 empty: no trainable parameters "
                "outside the layer stack; 1 works."
            )

    def split(self, params: Params) -> tuple[Params, Params]:
        """Returns the rest, and the layers with their layer axis unflattened into `row` and `fragment`."""
        leaves, treedef = jax.tree.flatten(params, is_leaf=is_named_array)
        axes = self._layer_axes(params)
        rest = [x if axis is None else None for x, axis in zip(leaves, axes, strict=True)]
        layers = [None if axis is None else self._unflatten(x, axis) for x, axis in zip(leaves, axes, strict=True)]
        return treedef.unflatten(rest), treedef.unflatten(layers)

    def take(self, params: Params, index: IntScalar | None) -> Params:
        """Returns one fragment: the tree of `params`, `None` outside the fragment, `row` for the layer axis."""
        rest, layers = self.split(params)
        return rest if index is None else take_fragment(layers, index)

    def put(self, params: Params, index: IntScalar | None, values: Params) -> Params:
        """Returns `params` with one fragment replaced by `values`, which is shaped as `take` returns it."""
        leaves, treedef = jax.tree.flatten(params, is_leaf=is_named_array)

        def put_leaf(x: NamedArray, axis: Axis | None, value: NamedArray | None) -> NamedArray:
            if value is None or axis is None:
                return x if value is None else value
            assert index is not None  # values inside a stack belong to a layer fragment
            layers = put_fragment(self._unflatten(x, axis), index, value)
            return layers.flatten_axes(self._axes(axis), axis)

        triples = zip(leaves, self._layer_axes(params), treedef.flatten_up_to(values), strict=True)
        return treedef.unflatten([put_leaf(*triple) for triple in triples])

    def describe(self, params: Params, fragment: int) -> str:
        """Says in words what a fragment holds."""
        depths = sorted({axis.size for axis in self._layer_axes(params) if axis is not None})
        if fragment == 0:
            return "everything outside the layer stack" if depths else "all trainable parameters"
        stride = self.num_fragments - 1
        stacks = []
        for depth in depths:
            rows = depth // stride
            interleaved, sequential = range(fragment - 1, depth, stride), range((fragment - 1) * rows, fragment * rows)
            stacks.append(" ".join(map(str, interleaved if self.layer_order == "interleaved" else sequential)))
        return "layers " + " and ".join(stacks)

    def _layer_axes(self, params: Params) -> list[Axis | None]:
        """For each leaf the layer axis of the stack that holds it, `None` if it is in the rest."""
        axes: list[Axis | None] = []
        for node in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Stacked) or is_named_array(x)):
            stacked = isinstance(node, Stacked) and self.num_fragments > 1
            axes += [node.Block if stacked else None] * len(jax.tree.leaves(node, is_leaf=is_named_array))
        return axes

    def _check_layers(self, layer_axes: set[Axis]) -> None:
        if not layer_axes:
            raise ModelError(
                f"{PATH}.num_fragments ({self.num_fragments}) needs trainable layers in a stack (haliax.nn.Stacked), "
                "found none; 1 works, or model.scan_layers: true where the model has that option."
            )
        for depth in {axis.size for axis in layer_axes}:
            if depth % (self.num_fragments - 1) != 0:
                valid = ", ".join(str(n + 1) for n in range(1, depth + 1) if depth % n == 0)
                raise OptionError(
                    f"{PATH}.num_fragments ({self.num_fragments}) must be 1 more than a divisor of the {depth} "
                    f"layers; 1, {valid} work."
                )

    def _unflatten(self, x: NamedArray, layer_axis: Axis) -> NamedArray:
        return x.unflatten_axis(layer_axis.name, self._axes(layer_axis))

    def _axes(self, layer_axis: Axis) -> tuple[Axis, Axis]:
        row = Axis(ROW, layer_axis.size // (self.num_fragments - 1))
        fragment = Axis(FRAGMENT, self.num_fragments - 1)
        return (row, fragment) if self.layer_order == "interleaved" else (fragment, row)


def take_fragment[T: PyTree](tree: T, index: IntScalar) -> T:
    """Returns slice `index` of the fragment axis; raw arrays (an optimizer's counts) carry it first.

    The slices stand behind a barrier: fused into what reads them, they would be read after the fragment is put
    back, and XLA would copy the whole stack to keep the old values.
    """

    def take(x: PyTree) -> PyTree:
        if not is_named_array(x):
            return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
        # pyrefly: ignore[bad-argument-type]  haliax allows a traced start, its type does not say so
        return hax.slice(x, FRAGMENT, start=index, length=1)[FRAGMENT, 0]

    return jax.lax.optimization_barrier(jax.tree.map(take, tree, is_leaf=is_named_array))


def put_fragment[T: PyTree](tree: T, index: IntScalar, values: T) -> T:
    """Returns `tree` with slice `index` of the fragment axis replaced; the inverse of `take_fragment`."""

    def put(x: PyTree, value: PyTree) -> PyTree:
        if not is_named_array(x):
            return jax.lax.dynamic_update_index_in_dim(x, value, index, axis=0)
        return hax.updated_slice(x, {FRAGMENT: index}, value.broadcast_axis(Axis(FRAGMENT, 1)))

    return jax.tree.map(put, tree, values, is_leaf=is_named_array)
