"""When each fragment is captured, reduced and merged: integer arithmetic on the step count."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """The sync schedule of Streaming DiLoCo; vanilla DiLoCo is one fragment [Streaming].

    A step t counts completed inner steps, from 1. All methods are pure, so every process and every
    resumed run derives the same events from t alone.
    """

    sync_period: int
    """H: inner steps between two syncs of one fragment, as asked for."""

    num_fragments: int
    """P."""

    overlap_steps: int
    """V: steps between capture and merge."""

    @property
    def steps_per_sync(self) -> int:
        """dh: steps between two syncs of any fragments."""
        return max(1, round(self.sync_period / self.num_fragments))

    @property
    def effective_period(self) -> int:
        """P*dh: steps between two syncs of one fragment, in effect."""
        return self.num_fragments * self.steps_per_sync

    def captured(self, step: int, since: int = 0) -> int | None:
        """The fragment captured after inner step `step`, if any.

        Args:
            step: Inner steps completed, t.
            since: Captures up to and including this step have been settled by a final sync.
        """
        if step <= since or step % self.steps_per_sync != 0:
            return None
        return step % self.effective_period // self.steps_per_sync

    def reduced(self, step: int, since: int = 0) -> int | None:
        """The fragment that takes its outer step in inner step `step`: one step after a capture if V >= 1."""
        return self.captured(step - min(self.overlap_steps, 1), since)

    def merged(self, step: int, since: int = 0) -> int | None:
        """The fragment that merges after inner step `step`: V steps after its capture."""
        return self.captured(step - self.overlap_steps, since)

    def unmerged(self, step: int, since: int = 0) -> Iterator[tuple[int, int]]:
        """The captures (step, fragment) whose merge lies after `step`, in order."""
        for capture in range(step - self.overlap_steps + 1, step + 1):
            fragment = self.captured(capture, since)
            if fragment is not None:
                yield capture, fragment

    def last_captured(self, fragment: int, step: int) -> int:
        """The latest step up to `step` after which `fragment` was captured; 0 if there is none."""
        offset = fragment * self.steps_per_sync
        latest = step - (step - offset) % self.effective_period
        return max(latest, 0)

    def unsynced(self, step: int, mixing_alpha: float, since: int = 0) -> list[int]:
        """Fragments whose islands hold progress no outer step has seen, after all merges due up to `step`.

        A merge with `mixing_alpha` 0 overwrites what an island did since the capture; any other keeps a share.
        """
        lag = self.overlap_steps if mixing_alpha == 0 else 0

        def last_settled(fragment: int) -> int:
            capture = self.last_captured(fragment, step)
            return min(capture + lag, step) if capture > since else since

        return [fragment for fragment in range(self.num_fragments) if last_settled(fragment) < step]
