"""Saves: the label that lies beside a checkpoint, and the checksums among its arrays."""

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..options.config import DiLoCoConfig
from .integrity import with_checksums
from .label import Label
from .recovery import make_room


def prepare(state: PyTree, path: str, mesh: Mesh, num_islands: int, diloco: DiLoCoConfig) -> dict[str, PyTree]:
    """Writes the label of a checkpoint at `path` and returns what is saved there: `state` with its checksums."""
    make_room(path)
    if jax.process_index() == 0:
        Label.of(num_islands, diloco, state.model).write(path)
    return with_checksums(state, mesh)
