"""Sync schedule: when each fragment is captured, reduced and merged, as integer arithmetic on the step count."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Crossing(NamedTuple):
    """What crosses between the islands in one step."""

    fragment: int
    piece: int
    """Which of the fragment's pieces, from 0."""

    last: bool
    """Whether the fragment has then crossed whole, and takes its outer step."""


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
        # t % (P*dh) // dh: with P = 4 in the order 1 2 3 0, as in the tutorial that MaxText has.
        if step <= since or step % self.steps_per_sync != 0:
            return None
        return step % self.effective_period // self.steps_per_sync

    @property
    def num_pieces(self) -> int:
        """Pieces that a captured fragment crosses in, one a step.

        V of them use all the time there is before the merge. With V > dh the next fragment is captured before that,
        and dh pieces keep the link as evenly busy: one fragment crosses at a time, the others wait for their merge.
        """
        return max(1, min(self.overlap_steps, self.steps_per_sync))

    def crossing(self, step: int, since: int = 0) -> Crossing | None:
        """What crosses in inner step `step`: at its end with V = 0, behind it and from one step later with V >= 1."""
        # V = 0 crosses in the capturing step itself.
        first = min(self.overlap_steps, 1)
        for piece in range(self.num_pieces):
            fragment = self.captured(step - first - piece, since)
            if fragment is not None:
                return Crossing(fragment, piece, last=piece == self.num_pieces - 1)
        return None

    def to_cross(self, step: int, since: int = 0) -> list[Crossing]:
        """What is captured up to `step` and crosses in later steps."""
        capture = step - step % self.steps_per_sync
        fragment = self.captured(capture, since) if self.overlap_steps > 0 else None
        if fragment is None:
            return []
        return [Crossing(fragment, n, n == self.num_pieces - 1) for n in range(step - capture, self.num_pieces)]

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
        # Captures of f fall on offset + n*P*dh; for f = 0 the first is after a whole period, at n = 1.
        latest = step - (step - offset) % self.effective_period
        return max(latest, 0)

    def unsynced(self, step: int, mixing_alpha: float, since: int = 0) -> list[int]:
        """Fragments whose islands hold progress no outer step has seen, after all merges due up to `step`.

        A merge with `mixing_alpha` 0 overwrites what an island did since the capture; any other keeps a share.
        """
        # With alpha = 0 what an island did between capture and merge is overwritten: nothing that a sync could save.
        lag = self.overlap_steps if mixing_alpha == 0 else 0

        def last_settled(fragment: int) -> int:
            capture = self.last_captured(fragment, step)
            return min(capture + lag, step) if capture > since else since

        return [fragment for fragment in range(self.num_fragments) if last_settled(fragment) < step]
