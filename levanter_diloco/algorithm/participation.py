"""Participation: who trains at a step, and each island's weight in a sync, as arithmetic on the step count."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from .schedule import Schedule


@dataclass(frozen=True)
class Participation:
    """The weights of the islands that the options give; what the guard leaves out is found on the devices.

    All methods are pure, so every process and every resumed run derives the same weights from the step alone.
    """

    num_islands: int
    """K."""

    schedule: Schedule
    seed: int = 0
    drop_rate: float = 0.0
    """Probability that an island's outer gradient is lost in a sync [DiLoCo, section 3.2]."""

    counts: Sequence[tuple[int, int]] = ()
    """`(start, count)`: islands that train once `start` steps are completed, the first `count` of them; none: all."""

    shares: Sequence[float] = ()
    """A weight for each island; none: all are equal."""

    rows: Callable[[int], int] | None = None
    """Rows of an island in the step after `completed` steps: weights by what an island has consumed; none: they do
    not count."""

    def active(self, completed: int) -> int:
        """How many islands train in the inner step after `completed` steps: those of the lowest numbers."""
        return max((entry for entry in self.counts if entry[0] <= completed), default=(0, self.num_islands))[1]

    def weights(self, step: int, fragment: int, since: int = 0) -> Float[np.ndarray, " K"]:
        """Weights, from 0 to 1, of the islands in the sync of `fragment` that is captured after inner step `step`.

        Only their ratios matter in a mean. 0 leaves an island out.

        Args:
            step: Inner steps completed, t.
            fragment: The fragment.
            since: Steps that earlier syncs of all fragments have seen.
        """
        weights = np.zeros(self.num_islands, np.float32)
        # Those that took step t, which began after t - 1 completed ones.
        weights[: self.active(step - 1)] = 1
        if self.shares:
            weights *= np.asarray(self.shares, np.float32) / np.float32(max(self.shares))
        if self.rows is not None:
            weights *= self._consumed(max(self.schedule.last_captured(fragment, step - 1), since), step)
        # Philox counts, so that any step can be drawn without those before it.
        draws = np.random.Generator(
            np.random.Philox(key=[self.seed % 2**64, step * self.schedule.num_fragments + fragment])
        )
        return np.where(draws.random(self.num_islands) < self.drop_rate, np.float32(0), weights)

    def _consumed(self, start: int, stop: int) -> Float[np.ndarray, " K"]:
        """Rows that each island has trained on in steps `start + 1` to `stop`, in units of one step's."""
        assert self.rows is not None
        steps = range(start, stop)
        each = [(self.rows(step), self.active(step)) for step in steps]
        # Relative to an island that was there all along: f32 holds shares better than counts of rows.
        total = max(sum(rows for rows, _ in each), 1)
        return np.array(
            [sum(rows for rows, active in each if k < active) for k in range(self.num_islands)]
        ) / np.float32(total)
