"""Starting and resuming: the run's own checkpoints, stock ones of Levanter, and when a save may ask the others."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import PyTree
from levanter.checkpoint import Checkpointer, load_checkpoint
from levanter.checkpoint_manifest import read_manifest

from .config import PATH
from .schedule import Schedule


def holds_islands(path: str) -> bool:
    """Whether the checkpoint at `path` is one of a DiLoCo run; a stock one of Levanter is not."""
    manifest = read_manifest(path)
    return manifest is not None and "schedule/islands" in manifest.array_paths


def check_resumable(path: str, facts: Mapping[str, int]) -> None:
    """Refuses a checkpoint whose islands, fragments or events this run's options do not continue.

    Args:
        path: A checkpoint of a DiLoCo run.
        facts: `state.schedule_facts` of this run.
    """
    template = {name: jax.ShapeDtypeStruct((), jnp.int32) for name in facts}
    stored = {name: int(value) for name, value in load_checkpoint(template, path, subpath="schedule").items()}
    bound = set(facts) if stored["overlap_steps"] or facts["overlap_steps"] else set(facts) - {"sync_period"}
    for name in facts:
        if name in bound and stored[name] != facts[name]:
            option = {"islands": "islands (K)", "sequential_layers": "layer_order (sequential)"}.get(name, name)
            raise ValueError(
                f"{PATH}.{option} ({facts[name]}) must be that of the checkpoint {path}; {stored[name]} works, or "
                "initialize_model_from_checkpoint_path to start anew from its weights."
            )


def save_without_barriers(checkpointer: Checkpointer, schedule: Schedule) -> None:
    """Lets `checkpointer` ask the other processes only when the islands meet anyway.

    The host broadcasts every step whether to save, which would be a barrier between islands. What the
    step count decides needs no broadcast; what the clock or a request decides waits for the next sync.
    """
    host_on_step = checkpointer.on_step

    def on_step(*, tree: PyTree, step: int, force: bool = False) -> None:
        every = checkpointer._get_current_step_save_interval(step)
        due = every is not None and step % every == 0
        if force or due or schedule.reduced(int(step) + 1) is not None:
            host_on_step(tree=tree, step=step, force=force)

    checkpointer.on_step = on_step
