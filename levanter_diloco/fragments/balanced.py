"""The partition of the trainable parameters into fragments of one size: `partition: balanced`.

Every leaf is cut, whatever holds it: a stack of layers, a list of them, or nothing. A leaf is seen as R rows, a
run of neighbouring axes made one, and fragment f of P owns rows `[f*R // P, (f+1)*R // P)` of each leaf. It is
taken as a window of `ceil(R / P)` rows, which never leaves the leaf; where the fragment owns one row less, the
window's last row is zero. So all fragments have one shape, and one program serves them, whatever P is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from math import prod

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.types import IntScalar
from haliax.util import is_named_array

from ..axes import FRAGMENT, ISLAND, Params
from ..errors import PATH, OptionError
from .partition import Partition, check_leaves
from .windows import put_window, take_window

ROW = "row"

ROWS = "rows"
"""The one part of this partition."""

TOLERANCE = 0.02
"""Zero rows relative to a leaf's own, up to which rows of outer axes are preferred."""


@dataclass(frozen=True)
class BalancedPartition(Partition):
    """P fragments of one size that cover the trainable leaves, for any model and any P up to the rows it has.

    Cutting moves nothing between devices: rows run over axes that are whole on every device, or over each
    device's own share of a sharded one.
    """

    sharded: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Over how many devices of an island each logical axis is split; axes that are not split may be left out."""

    @property
    def parts(self) -> dict[str, int]:
        return {ROWS: self.num_fragments}

    @property
    def sharding(self) -> Mapping[str, int]:
        return self.sharded

    def check(self, params: Params) -> None:
        check_leaves(params)
        leaves = jax.tree.leaves(params, is_leaf=is_named_array)
        if max(self._rows(leaf.axes).count for leaf in leaves) < self.num_fragments:  # all give fragment 0 no row
            most = max(rows.count for leaf in leaves for rows in self._choices(leaf.axes))
            raise OptionError(
                f"{PATH}.num_fragments ({self.num_fragments}) leaves fragment 0 empty: no trainable leaf is cut into "
                f"as many rows; {most} works."
            )

    def take(self, params: Params, part: str, index: IntScalar) -> Params:
        """Returns one fragment: a window of every leaf, zero in a row that the fragment does not own.

        The windows stand behind a barrier: fused into what reads them, they would be read after the fragment is
        put back, and XLA would copy the whole leaf to keep the old values.
        """
        del part

        def take(x: NamedArray) -> NamedArray:
            _, window, own, _ = self._window(x, index)
            return hax.where(own, window, jnp.zeros((), x.dtype))

        return jax.lax.optimization_barrier(jax.tree.map(take, params, is_leaf=is_named_array))

    def put(self, params: Params, part: str, index: IntScalar, values: Params) -> Params:
        """Returns `params` with the rows that one fragment owns replaced by those of `values`."""
        del part

        def put(x: NamedArray, value: NamedArray) -> NamedArray:
            seen, window, own, start = self._window(x, index)
            seen = put_window(seen, ROW, start, hax.where(own, value, window))
            return hax.named(seen.array.reshape(x.array.shape), x.axes)

        return jax.tree.map(put, params, values, is_leaf=is_named_array)

    def stacked(self, params: Params, part: str) -> Params:
        Fragment = Axis(FRAGMENT, self.num_fragments)
        return hax.vmap(lambda index: self.take(params, part, index), Fragment)(jnp.arange(Fragment.size))

    def describe(self, params: Params, fragment: int) -> str:
        leaves = jax.tree.leaves(params, is_leaf=is_named_array)
        held = sum(self._rows(leaf.axes).owned(fragment) > 0 for leaf in leaves)
        of_what = "every leaf" if held == len(leaves) else f"{held} of {len(leaves)} leaves"
        return f"share {fragment + 1} of {self.num_fragments} of {of_what}"

    def padding(self, params: Params) -> float:
        """Zero rows of all fragments together, relative to the parameters: what equal shapes cost."""
        leaves = jax.tree.leaves(params, is_leaf=is_named_array)
        return sum(leaf.size * self._rows(leaf.axes).padding for leaf in leaves) / sum(leaf.size for leaf in leaves)

    def _window(self, x: NamedArray, index: IntScalar) -> tuple[NamedArray, NamedArray, NamedArray, IntScalar]:
        """Returns `x` as rows, the fragment's window of them, which rows of the window it owns, and the first one."""
        rows = self._rows(x.axes)
        axes = rows.seen(x.axes)
        seen = hax.named(x.array.reshape([axis.size for axis in axes]), axes)
        Window = Axis(ROW, rows.window)
        window = take_window(seen, Window, rows.start(index))
        return seen, window, hax.arange(Window) < rows.owned(index), rows.start(index)

    def _rows(self, axes: tuple[Axis, ...]) -> "_Rows":
        """Picks, of the rows with little padding, the outermost; failing any, those with the least.

        Rows of outer axes are long stretches of memory. Where inner axes become one, XLA may copy the leaf, whose
        innermost two it lays out in tiles.
        """

        def cost(rows: _Rows) -> tuple[float, bool, int, int]:
            enough = rows.count >= self.num_fragments
            fits = enough and rows.padding <= TOLERANCE
            return 0 if fits else rows.padding, not enough, rows.last, rows.last - rows.first

        return min(self._choices(axes), key=cost)

    def _choices(self, axes: tuple[Axis, ...]) -> Iterator["_Rows"]:
        """Yields all rows whose cutting moves nothing between devices; a run of no axes is one row."""
        begin = int(axes[:1] != () and axes[0].name == ISLAND)
        for first, last in combinations_with_replacement(range(begin, len(axes) + 1), 2):
            shards, *within = [self.sharded.get(axis.name, 1) for axis in axes[first:last]] or [1]
            if max(within, default=1) == 1:
                count = prod(axis.size for axis in axes[first:last]) // shards
                yield _Rows(first, last, shards, count, self.num_fragments)


@dataclass(frozen=True)
class _Rows:
    """A leaf seen as rows: the axes `[first, last)`, of which the first may be sharded, become one."""

    first: int
    last: int
    shards: int
    count: int
    """R; of one shard."""

    num_fragments: int

    @property
    def window(self) -> int:
        """Rows that are taken for a fragment: the most that one owns."""
        return -(-self.count // self.num_fragments)

    @property
    def padding(self) -> float:
        """Zero rows of all fragments, relative to R."""
        return self.window * self.num_fragments / self.count - 1

    def seen(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Axes of the leaf as rows: `row` for the run, after what a sharded axis keeps of itself: its shards."""
        shards = [Axis(axes[self.first].name, self.shards)] if self.shards > 1 else []
        return (*axes[: self.first], *shards, Axis(ROW, self.count), *axes[self.last :])

    def start(self, index: IntScalar) -> IntScalar:
        """First row of a fragment, `index*R // P` without that product: it may exceed 32 bits."""
        each, left = divmod(self.count, self.num_fragments)
        return index * each + index * left // self.num_fragments

    def owned(self, index: IntScalar) -> IntScalar:
        """Rows that a fragment owns: all of its window, or all but the last."""
        each, left = divmod(self.count, self.num_fragments)
        return each + (index + 1) * left // self.num_fragments - index * left // self.num_fragments
