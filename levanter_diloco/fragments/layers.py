"""The partition by layers, `partition: layers` [Streaming].

Layers are found by container: leaves under a `haliax.nn.Stacked` carry a layer axis, and everything else
is "the rest". The layer axis is unflattened into the named axes `row` and `fragment`, so that a fragment
is one slice.
"""

from dataclasses import dataclass

import jax
from haliax import Axis, NamedArray
from haliax.nn import Stacked
from haliax.types import IntScalar
from haliax.util import is_named_array

from ..axes import FRAGMENT, Params
from ..errors import PATH, ModelError, OptionError
from ..options.config import LayerOrder
from .partition import Partition, check_leaves, put_fragment, take_fragment
from .windows import beside, on_device

ROW = "row"
REST, LAYERS = "rest", "layers"


@dataclass(frozen=True)
class LayerPartition(Partition):
    """Fragment 0 is the rest, fragments 1..P-1 are equal shares of the layers; `partition: layers` [Streaming].

    With P = 1 fragment 0 is everything.
    """

    layer_order: LayerOrder

    @property
    def parts(self) -> dict[str, int]:
        return {REST: 1, LAYERS: self.num_fragments - 1} if self.num_fragments > 1 else {REST: 1}

    def check(self, params: Params) -> None:
        check_leaves(params)
        layer_axes = self._layer_axes(params)
        if self.num_fragments > 1:
            self._check_layers({axis for axis in layer_axes if axis is not None})
        if None not in layer_axes:
            raise OptionError(
                f"{PATH}.num_fragments ({self.num_fragments}) leaves fragment 0 empty: no trainable parameters "
                "outside the layer stack; 1 works."
            )

    def take(self, params: Params, part: str, index: IntScalar) -> Params:
        held = self._held(params, part)
        if part == REST:
            return jax.tree.map(on_device, held, is_leaf=is_named_array)
        return take_fragment(held, index)

    def put(self, params: Params, part: str, index: IntScalar, values: Params) -> Params:
        leaves, treedef = jax.tree.flatten(params, is_leaf=is_named_array)

        def put_leaf(x: NamedArray, axis: Axis | None, value: NamedArray | None) -> NamedArray:
            # In host memory a leaf stays there: `beside` puts the new one where the old one lies.
            if value is None or axis is None:
                return x if value is None else beside(value, x)
            layers = put_fragment(self._unflatten(x, axis), index, value)
            return layers.flatten_axes(self._axes(axis), axis)

        triples = zip(leaves, self._layer_axes(params), treedef.flatten_up_to(values), strict=True)
        return treedef.unflatten([put_leaf(*triple) for triple in triples])

    def stacked(self, params: Params, part: str) -> Params:
        held, Only = self._held(params, part), Axis(FRAGMENT, 1)
        return held if part == LAYERS else jax.tree.map(lambda x: x.broadcast_axis(Only), held, is_leaf=is_named_array)

    def describe(self, params: Params, fragment: int) -> str:
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

    def _held(self, params: Params, part: str) -> Params:
        """The leaves of a part, the layer axis unflattened into `row` and `fragment`."""
        leaves, treedef = jax.tree.flatten(params, is_leaf=is_named_array)

        def held(x: NamedArray, axis: Axis | None) -> NamedArray | None:
            if (axis is None) != (part == REST):
                return None
            return x if axis is None else self._unflatten(x, axis)

        return treedef.unflatten([held(*pair) for pair in zip(leaves, self._layer_axes(params), strict=True)])

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
        # Interleaved: layer = row*(P-1) + fragment, so fragment f has every (P-1)-th layer [Streaming].
        return (row, fragment) if self.layer_order == "interleaved" else (fragment, row)
