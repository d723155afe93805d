"""Windows of arrays that may lie in host memory: of such an array only the window crosses to the device."""

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.types import IntScalar
from jax import memory

TILE = "tile"

TILE_ROWS = 8
"""A TPU lays out the last two axes of 32-bit numbers in tiles of 8 rows, and copies from the host whole tiles."""


def on_device(x: NamedArray) -> NamedArray:
    """Returns `x` in device memory."""
    return _in(memory.Space.Device, x)


def beside(value: NamedArray, x: NamedArray) -> NamedArray:
    """Returns `value` in the memory where `x` lies."""
    return _in(jax.typeof(x.array).memory_space, value)


def take_window(x: NamedArray, Window: Axis, start: IntScalar) -> NamedArray:
    """Returns `Window.size` neighbours along the axis `Window.name` of `x`, in device memory."""
    if _crosses_by_rows(x, Window.name):
        return on_device(_slice(x, Window, start))
    tiled, Tiles, first = _tiles(x, Window, start)
    taken = _joined(on_device(_slice(tiled, Tiles, first)), Window.name)
    return _slice(taken, Window, start - first * tiled.axis_size(Window.name))


def put_window(x: NamedArray, name: str, start: IntScalar, values: NamedArray) -> NamedArray:
    """Returns `x` with what `take_window` takes replaced by `values`."""
    if _crosses_by_rows(x, name):
        return hax.updated_slice(x, {name: start}, beside(values, x))
    tiled, Tiles, first = _tiles(x, values.resolve_axis(name), start)
    taken = on_device(_slice(tiled, Tiles, first))
    offset = start - first * tiled.axis_size(name)
    new = hax.updated_slice(_joined(taken, name), {name: offset}, values)
    new = new.unflatten_axis(name, (Tiles, tiled.resolve_axis(name)))
    return _joined(hax.updated_slice(tiled, {TILE: first}, beside(new, x)), name)


def _crosses_by_rows(x: NamedArray, name: str) -> bool:
    outer = x.axis_names[:-2]
    return name in outer or jax.typeof(x.array).memory_space == memory.Space.Device


def _tiles(x: NamedArray, Window: Axis, start: IntScalar) -> tuple[NamedArray, Axis, IntScalar]:
    """Returns `x` cut into tiles along the window's axis, how many of them hold a window, and the first that does.

    Where its rows do not fill tiles, or lie along a tile's other side, the whole array counts as one.
    """
    size = x.axis_size(Window.name)
    by_tiles = x.axis_names[-2:-1] == (Window.name,) and size % TILE_ROWS == 0
    rows = TILE_ROWS if by_tiles else size
    Tiles = Axis(TILE, min(size // rows, (Window.size + 2 * rows - 2) // rows))
    tiled = x.unflatten_axis(Window.name, (Axis(TILE, size // rows), Axis(Window.name, rows)))
    return tiled, Tiles, jnp.minimum(start // rows, size // rows - Tiles.size)


def _joined(tiled: NamedArray, name: str) -> NamedArray:
    rows = Axis(name, tiled.axis_size(TILE) * tiled.axis_size(name))
    return tiled.flatten_axes((TILE, name), rows)


def _slice(x: NamedArray, Window: Axis, start: IntScalar) -> NamedArray:
    # pyrefly: ignore[bad-argument-type]  haliax allows a traced start, its type does not say so
    return hax.slice(x, Window.name, Window, start=start)


def _in(space: memory.Space, x: NamedArray) -> NamedArray:
    if jax.typeof(x.array).memory_space == space:
        return x
    return NamedArray(jax.device_put(x.array, space), x.axes)
