"""What a checkpoint says of itself before it is loaded."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import ShapeDtypeStruct
from levanter.checkpoint import load_checkpoint
from levanter.checkpoint_manifest import CheckpointManifest, read_manifest

SCHEDULE = "schedule/"


def holds_islands(path: str) -> bool:
    """Whether the checkpoint at `path` is one of a DiLoCo run; a stock one of Levanter is not."""
    manifest = read_manifest(path)
    return manifest is not None and "schedule/islands" in manifest.array_paths


def stored_facts(path: str) -> dict[str, int]:
    """The layout in which the checkpoint at `path` was written."""
    names = [name.removeprefix(SCHEDULE) for name in _manifest(path).array_paths if name.startswith(SCHEDULE)]
    template = {name: ShapeDtypeStruct((), jnp.int32) for name in names}
    arrays: Mapping[str, Any] = load_checkpoint(template, path, subpath="schedule")  # Any: arrays for structs
    return {name: int(value) for name, value in arrays.items()}


def _manifest(path: str) -> CheckpointManifest:
    manifest = read_manifest(path)
    assert manifest is not None  # `holds_islands`
    return manifest
