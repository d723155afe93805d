"""Where the outer state lies while nothing is done with it: device or pinned host memory."""

import jax
from haliax import NamedArray
from jax import memory


def on_device(x: NamedArray) -> NamedArray:
    """Returns `x` in device memory; of a slice of what lies in host memory only the slice crosses."""
    return _moved(x, memory.Space.Device)


def beside(value: NamedArray, x: NamedArray) -> NamedArray:
    """Returns `value` in the memory where `x` lies."""
    return _moved(value, jax.typeof(x.array).memory_space)


def _moved(x: NamedArray, space: memory.Space) -> NamedArray:
    if jax.typeof(x.array).memory_space == space:
        return x
    return NamedArray(jax.device_put(x.array, space), x.axes)
