"""The outer model as an Orbax checkpoint: a nested dict of arrays under the names of Hugging Face's state dict.

Plain `orbax.checkpoint` and flax read it without this package: `model/layers/0/mlp/up_proj/weight` and so on, each
array as a PyTorch module would have it, in f32.
"""

import os
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict
from haliax.jax_utils import is_jax_array_like
from haliax.partitioning import ResourceMapping
from haliax.state_dict import (
    flatten_modules_for_export,
    from_torch_compatible_state_dict,
    to_state_dict,
    to_torch_compatible_state_dict,
)
from jaxtyping import PyTree

from ..errors import option_error

OPTION = "initialize_from_orbax"


def write(model: PyTree, path: str) -> None:
    """Writes the arrays of `model` to the folder `path`, which must not exist."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(_absolute(path), unflatten_dict(to_torch_compatible_state_dict(model), sep="."))


def check(path: str, shapes: PyTree) -> None:
    """Refuses what does not fit a model of `shapes`, by its names and shapes alone.

    Raises:
        OptionError: If `path` is no Orbax checkpoint, or one of another model.
    """
    stored = {name: tuple(array.shape) for name, array in _metadata(path).items()}
    state = eqx.filter_eval_shape(_state_dict, eqx.filter(shapes, _is_array_like))
    expected = {name: tuple(array.shape) for name, array in state.items()}
    missing, more = sorted(expected.keys() - stored.keys()), sorted(stored.keys() - expected.keys())
    other = sorted(name for name in expected.keys() & stored.keys() if expected[name] != stored[name])
    faults = [f"lacks {_some(missing)}"] * bool(missing) + [f"has {_some(more)} besides"] * bool(more)
    faults += [f"has {name} of shape {stored[name]} instead of {expected[name]}" for name in other[:3]]
    if faults:
        rule = f"be of this run's model, and it {', '.join(faults)}"
        raise option_error(OPTION, path, rule, "a folder that `levanter-diloco export --format orbax` wrote from one")


def read(path: str, like: PyTree, mapping: ResourceMapping) -> PyTree:
    """Returns the model at `path`, in f32.

    Args:
        path: The folder; `check` has found nothing wrong with it.
        like: A model of the same structure, or its shapes; leaves that a state dict lacks come from it.
        mapping: Logical to mesh axes of the result.
    """
    with ocp.StandardCheckpointer() as checkpointer:
        tree: Mapping[str, Any] = checkpointer.restore(_absolute(path))  # Any: arrays, nested
    arrays = {name: np.asarray(array, np.float32) for name, array in flatten_dict(tree, sep=".").items()}
    # Non-arrays of the model, such as activation functions, come from the run's own.
    shapes = eqx.filter_eval_shape(lambda: eqx.filter(like, is_jax_array_like))
    build = hax.named_jit(from_torch_compatible_state_dict, axis_resources=mapping, out_axis_resources=mapping)
    return eqx.combine(build(shapes, arrays), like)


def _state_dict(model: PyTree) -> dict[str, jax.Array]:
    return to_state_dict(flatten_modules_for_export(model))


def _is_array_like(x: object) -> bool:
    return is_jax_array_like(x) or isinstance(x, jax.ShapeDtypeStruct)


def _metadata(path: str) -> dict[str, Any]:  # Any: orbax's own class
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.metadata(_absolute(path)).item_metadata
    if found is None:
        works = "a folder that `levanter-diloco export --format orbax` wrote"
        raise option_error(OPTION, path, "be an Orbax checkpoint, and none is there", works)
    return flatten_dict(found.tree, sep=".")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)
