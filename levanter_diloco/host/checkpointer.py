"""The host's `Checkpointer`: when it may ask the other processes, and what is saved along with a state."""

from collections.abc import Callable
from typing import Any

from jaxtyping import PyTree
from levanter.checkpoint import Checkpointer
from rigging.filesystem.storage_path import prefix_join


def save_without_barriers(checkpointer: Checkpointer, may_ask: Callable[[int], bool]) -> None:
    """Lets `checkpointer` ask the other processes only after steps at which `may_ask`.

    The host broadcasts every step whether to save, which would be a barrier. What the step count decides needs no
    broadcast; what the clock or a request decides waits.
    """
    host_on_step = checkpointer.on_step

    def on_step(*, tree: PyTree, step: int, force: bool = False) -> None:
        every = checkpointer._get_current_step_save_interval(step)
        due = every is not None and step % every == 0
        if force or due or may_ask(step):
            host_on_step(tree=tree, step=step, force=force)

    checkpointer.on_step = on_step


def save_along(checkpointer: Checkpointer, prepare: Callable[[PyTree, str], PyTree]) -> None:
    """Lets `checkpointer` save what `prepare` makes of a tree and the checkpoint's path, instead of the tree."""
    host_save = checkpointer.save_checkpoint

    def save(
        *, tree: PyTree, destination: str, base_path_override: str | None = None, **options: Any
    ) -> None:  # Any: the host's
        prepared = prepare(tree, prefix_join(base_path_override or checkpointer.base_path, destination))
        host_save(prepared, destination=destination, base_path_override=base_path_override, **options)

    # pyrefly: ignore[bad-assignment]  the host's hook passes every argument by name
    checkpointer.save_checkpoint = save
