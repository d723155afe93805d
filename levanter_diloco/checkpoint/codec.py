"""Codec of what a checkpoint says of its run beside the arrays of a state, and of what older ones say differently.

Version 0.1.0 had the facts of the layout under `schedule/`, no count of the bytes sent, and an island's status in its
weight: -1 where the guard had left it out, -2 once it had started anew.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import PyTree

from ..islands.byte_count import words_of
from ..islands.state import DiLoCoState, Status
from .integrity import read_array, stored_arrays

LAYOUT, OLD_LAYOUT = "layout", "schedule"


def holds_islands(path: str) -> bool:
    """Whether the checkpoint at `path` is one of a DiLoCo run; a stock one of Levanter is not."""
    return f"{_layout(path)}/islands" in stored_arrays(path)


def is_old(path: str) -> bool:
    """Whether version 0.1.0 wrote the checkpoint at `path`."""
    return f"{OLD_LAYOUT}/islands" in stored_arrays(path)


def stored_facts(path: str) -> dict[str, int]:
    """The layout in which the checkpoint at `path` was written, as `Layout.facts` has it."""
    under = f"{_layout(path)}/"
    names = [name.removeprefix(under) for name in stored_arrays(path) if name.startswith(under)]
    return {name: int(read_array(path, under + name)) for name in names}


def in_checkpoint(path: str, mask: PyTree) -> PyTree:
    """A mask of a state, less the arrays that the checkpoint at `path` is too old to have."""
    if not is_old(path):
        return mask
    islands = dataclasses.replace(mask.islands, status=False)
    layout = dict.fromkeys(mask.layout, False)
    return dataclasses.replace(mask, islands=islands, layout=layout, sent_bytes=False)


def upgraded(state: DiLoCoState, facts: Mapping[str, int], sent_bytes: int) -> DiLoCoState:
    """A state that was loaded from an old checkpoint, with its new arrays as that would have them.

    Args:
        state: The state, whatever stands in the arrays that `in_checkpoint` leaves out.
        facts: Those of the stored layout.
        sent_bytes: What each island has sent by its count of outer steps, which is all that is known.
    """
    old = state.islands.weights
    status = jnp.where(old == -1, Status.LEFT_OUT, jnp.where(old == -2, Status.RESTARTED, Status.COUNTED))
    islands = dataclasses.replace(state.islands, weights=jnp.maximum(old, 0), status=status.astype(jnp.int8))
    layout = {name: jnp.asarray(value, jnp.int32) for name, value in facts.items()}
    return dataclasses.replace(state, islands=islands, layout=layout, sent_bytes=words_of(sent_bytes))


def _layout(path: str) -> str:
    return OLD_LAYOUT if is_old(path) else LAYOUT
