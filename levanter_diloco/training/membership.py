"""Membership: islands that join, and islands that the guard sends back to the outer parameters."""

import logging
import math
from collections.abc import Mapping

import numpy as np

from ..algorithm.participation import Participation
from ..errors import PATH, RunError
from ..islands.programs import Programs
from ..islands.state import DiLoCoState
from .metrics import StepRecord, SyncRecord

logger = logging.getLogger(__name__)


def admit(state: DiLoCoState, programs: Programs, participation: Participation, *, copied: bool) -> DiLoCoState:
    """Lets as many islands train as the options say for the next step; one that joins starts from Theta.

    What the state says of the step before decides who joins, so that options may change on resume.
    """
    before, now = int(state.active), participation.active(int(state.step))
    if now == before:
        return state
    logger.info("From step %d on %d of %d islands train.", int(state.step), now, participation.num_islands)
    islands = np.arange(participation.num_islands)
    return programs.restart(state, (before <= islands) & (islands < now), now, copied=copied)


def replace_left_out(
    state: DiLoCoState, programs: Programs, record: StepRecord, syncs: Mapping[int, SyncRecord]
) -> DiLoCoState:
    """Starts the islands that the guard left out of syncs of this step anew from Theta, with fresh moments.

    Args:
        state: The state after the syncs.
        programs: The run's programs.
        record: The step.
        syncs: Those of its syncs that islands have not been healed of, by fragment.

    Raises:
        RunError: If no island is left that trains.
    """
    step = int(state.step)
    # One that has left since the capture starts from Theta when it comes again.
    broken = {fragment: [k for k in sync.broken if k < record.active] for fragment, sync in syncs.items()}
    # Where a process speaks for all islands it need not wait for a sync to know that all are lost.
    failed = [k for k, own in record.islands.items() if own.loss is not None and not math.isfinite(own.loss)]
    # Of one fragment the guard's factor never leaves out all. Each fragment by itself: islands that are left out of
    # different ones have sound numbers in the others.
    if record.active in map(len, (failed, *broken.values())):
        raise RunError(
            f"no island has finite numbers left after step {step}. The outer parameters are untouched: the same "
            "command goes on from the last checkpoint, if there is one, and a lower optimizer.learning_rate may help; "
            f"{PATH}.guard: false leaves such islands to trainer.crash_on_nan."
        )
    left_out = {island: fragment for fragment, islands in broken.items() for island in islands}
    for island, fragment in left_out.items():
        logger.warning(
            "Island %d is left out of the sync of fragment %d and starts anew from the outer parameters after step "
            "%d: its loss or outer gradient is not finite, or the latter longer than %s.guard_factor allows.",
            *(island, fragment, step, PATH),
        )
    if not left_out:
        return state
    chosen = np.isin(np.arange(len(state.islands.failed)), list(left_out))
    return programs.restart(state, chosen, record.active, copied=False)
