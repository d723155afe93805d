"""Saves that can be checked, and which checkpoint a run goes on from where some are damaged."""

import itertools
import logging
from collections.abc import Sequence

import fsspec
import jax
from fsspec.implementations.local import LocalFileSystem
from jax.experimental.multihost_utils import sync_global_devices
from levanter.checkpoint import _discover_checkpoint_paths_single, discover_checkpoint_candidates

from ..errors import PATH, DamagedCheckpoint, OptionError
from ..options.config import OnDamagedCheckpoint
from .codec import holds_islands
from .integrity import check

logger = logging.getLogger(__name__)

METADATA = "metadata.json"
"""What the host writes last of a save; a folder without it is no checkpoint."""

DAMAGED_METADATA = "metadata.damaged.json"


def refuse_without_metadata(paths: Sequence[str]) -> None:
    """Refuses a checkpoint under `paths` whose metadata.json cannot be read, which the host would pass over or die of.

    Raises:
        DamagedCheckpoint: If there is one.
    """
    known = {candidate.path for path in paths for candidate in discover_checkpoint_candidates(path)}
    for path in paths:
        for found in _discover_checkpoint_paths_single(path):
            if found not in known:
                advice = "remove the folder to go on from the one before it"
                raise DamagedCheckpoint(found, f"metadata.json cannot be read; {advice}")


def checkpoint_to_resume(paths: Sequence[str], on_damaged: OnDamagedCheckpoint) -> str:
    """The latest checkpoint under `paths`, or with `previous` the latest that is whole.

    A damaged one of these is taken out of the way, for the run will write its own in its place: see `_set_aside`.

    Raises:
        FileNotFoundError: If there is none.
        DamagedCheckpoint: If it is damaged and may not be passed over, or all are.
    """
    refuse_without_metadata(paths)
    found = [candidate.path for candidate in discover_checkpoint_candidates(*paths)]
    if not found:
        raise FileNotFoundError(f"Could not discover checkpoint under any of: {list(paths)}")
    damaged: list[DamagedCheckpoint] = []
    for path in reversed(found):
        try:
            check(path)
        except DamagedCheckpoint as error:
            damaged.append(error)
            if on_damaged == "refuse":
                break
            logger.warning("Passed over: %s", error)
        else:
            _set_aside([error.path for error in damaged], paths)
            return path
    if on_damaged == "previous":
        raise DamagedCheckpoint(damaged[0].path, f"{damaged[0].reason}; no other is whole")
    advice = f"{PATH}.on_damaged_checkpoint (refuse) lets nothing else be used; previous takes the one before it"
    raise DamagedCheckpoint(damaged[0].path, f"{damaged[0].reason}; {advice}")


def latest(folder: str) -> str:
    """The latest checkpoint under `folder`, which may be one itself.

    Raises:
        OptionError: If there is none of a DiLoCo run.
    """
    found = [candidate.path for candidate in discover_checkpoint_candidates(folder)]
    if not found:
        raise OptionError(f"--checkpoint ({folder}) must have a metadata.json, or folders that do; RUN/step-99 works.")
    if not holds_islands(found[-1]):
        raise OptionError(f"--checkpoint ({found[-1]}) must be of a DiLoCo run, and it is one of stock Levanter.")
    return found[-1]


def set_unfinished_aside(roots: Sequence[str]) -> None:
    """Moves saves under `roots` that were killed to `damaged/` there: one in another layout cannot write over them.

    In an object store, where a move is a copy, they stay: no listing takes them for checkpoints, and `make_room`
    removes one whose name is needed.
    """
    if jax.process_index() == 0:
        for root in roots:
            fs, folder = fsspec.core.url_to_fs(root)
            for save in fs.glob(f"{folder}/step-*") if _renames(fs) else ():
                if _is_unfinished(fs, save):
                    _move_aside(fs, save)
    if jax.process_count() > 1:
        sync_global_devices("unfinished saves are out of the way")


def make_room(path: str) -> None:
    """Removes what a killed save has left at `path` in an object store, before another one writes there."""
    fs, folder = fsspec.core.url_to_fs(path)
    if _renames(fs):
        return
    if jax.process_index() == 0 and fs.exists(folder) and _is_unfinished(fs, folder):
        logger.warning("Removed %s, which was never finished, for a save of that name.", path)
        fs.rm(folder, recursive=True)
    if jax.process_count() > 1:
        sync_global_devices("there is room for the save")


def _set_aside(damaged: Sequence[str], roots: Sequence[str]) -> None:
    """Takes those of the checkpoints that lie right under one of `roots` out of the way of the run's own.

    They are moved to `damaged/` there; in an object store their metadata is renamed, so that they are like unfinished.
    """
    if jax.process_index() == 0:
        for path in damaged:
            if path.rstrip("/").rpartition("/")[0] in [own.rstrip("/") for own in roots]:
                fs, folder = fsspec.core.url_to_fs(path)
                (_move_aside if _renames(fs) else _mark)(fs, folder)
    if damaged and jax.process_count() > 1:
        sync_global_devices("damaged checkpoints are out of the way")


def _renames(fs: fsspec.AbstractFileSystem) -> bool:
    """Whether a move is a rename. In an object store it copies every byte, and checkpoints have terabytes."""
    return isinstance(fs, LocalFileSystem)


def _is_unfinished(fs: fsspec.AbstractFileSystem, folder: str) -> bool:
    return not fs.exists(f"{folder}/{METADATA}")


def _mark(fs: fsspec.AbstractFileSystem, folder: str) -> None:
    fs.pipe(f"{folder}/{DAMAGED_METADATA}", fs.cat(f"{folder}/{METADATA}"))
    fs.rm(f"{folder}/{METADATA}")
    logger.warning("Marked %s, which is not whole: its %s is %s now.", folder, METADATA, DAMAGED_METADATA)


def _move_aside(fs: fsspec.AbstractFileSystem, path: str) -> None:
    root, _, name = path.rstrip("/").rpartition("/")
    aside = _free(fs, f"{root}/damaged/{name}")
    fs.makedirs(f"{root}/damaged", exist_ok=True)
    fs.mv(path, aside, recursive=True)
    logger.warning("Moved %s, which is not whole, to %s.", path, aside)


def _free(fs: fsspec.AbstractFileSystem, path: str) -> str:
    """`path`, or with a number behind it if that exists."""
    return next(name for n in itertools.count() if not fs.exists(name := f"{path}.{n}" if n else path))
