"""Saves that can be checked, and which checkpoint a run goes on from where some are damaged."""

import itertools
import logging
from collections.abc import Sequence

import fsspec
import jax
from jax.experimental.multihost_utils import sync_global_devices
from levanter.checkpoint import _discover_checkpoint_paths_single, discover_checkpoint_candidates

from ..errors import PATH, DamagedCheckpoint, OptionError
from ..options.config import OnDamagedCheckpoint
from .codec import holds_islands
from .integrity import check

logger = logging.getLogger(__name__)


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

    A damaged one of these is moved to the folder `damaged` beside it, for the run will write its own in its place.

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
    """Moves saves under `roots` that were killed to `damaged/` there: one in another layout cannot write over them."""
    if jax.process_index() == 0:
        for root in roots:
            fs, folder = fsspec.core.url_to_fs(root)
            for save in fs.glob(f"{folder}/step-*"):
                if not fs.exists(f"{save}/metadata.json"):
                    _move_aside(fs, save)
    if jax.process_count() > 1:
        sync_global_devices("unfinished saves are out of the way")


def _set_aside(damaged: Sequence[str], roots: Sequence[str]) -> None:
    """Moves those of the checkpoints that lie right under one of `roots` to `damaged/` there."""
    if jax.process_index() == 0:
        for path in damaged:
            if path.rstrip("/").rpartition("/")[0] in [own.rstrip("/") for own in roots]:
                _move_aside(*fsspec.core.url_to_fs(path))
    if damaged and jax.process_count() > 1:
        sync_global_devices("damaged checkpoints are out of the way")


def _move_aside(fs: fsspec.AbstractFileSystem, path: str) -> None:
    root, _, name = path.rstrip("/").rpartition("/")
    aside = _free(fs, f"{root}/damaged/{name}")
    fs.makedirs(f"{root}/damaged", exist_ok=True)
    fs.mv(path, aside, recursive=True)
    logger.warning("Moved %s, which is not whole, to %s.", path, aside)


def _free(fs: fsspec.AbstractFileSystem, path: str) -> str:
    """`path`, or with a number behind it if that exists."""
    return next(name for n in itertools.count() if not fs.exists(name := f"{path}.{n}" if n else path))
