"""The rows of an island, by arithmetic on the loader's index, and a dataset that follows it.

The host's loader reads one stream, B rows a step, of which island k trains on the k-th part. Here an index of that
stream becomes a position in an island's own stream, by the step count alone: a resumed run reads on where it stopped.
"""

import asyncio
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from levanter.data.dataset import AsyncDataset
from levanter.schedule import BatchSchedule
from levanter.utils.thread_utils import blocking_wait

from ..algorithm.participation import Participation

FOREVER = 2**40
"""More steps than a run has."""


@dataclass(frozen=True)
class Rows:
    """The sequence that stands in each row of each step, as a stream and a position in it.

    A stream moves on by the rows of the islands that train; the rows of an absent island repeat another's.
    """

    participation: Participation
    batches: BatchSchedule
    """B at each step, a multiple of K."""

    shared: bool
    """Whether the islands read one stream in turn, number 0, or each its own, of its number."""

    def consumed(self, stream: int, step: int) -> int:
        """Sequences of `stream` that the steps before `step` have read."""
        changes = [start for start, _ in self.participation.counts if 0 < start < step]
        return sum(
            self._readers(stream, start) * self._rows(start, stop) for start, stop in pairwise([0, *changes, step])
        )

    def locate(self, index: int) -> tuple[int, int]:
        """The stream and the position in it of what the loader finds at `index`."""
        step = self.batches.find_step_containing_offset(index)
        rows = self._rows(step, step + 1)
        island, row = divmod(index - self.batches.global_data_offset_by_step(step), rows)
        # The rows of an absent island repeat another's, whose step counts; its own comes to nothing.
        reader = island % self.participation.active(step)
        if self.shared:
            return 0, self.consumed(0, step) + reader * rows + row
        return reader, self.consumed(reader, step) + row

    def steps_within(self, stream: int, length: int) -> int:
        """Steps for which `length` sequences of `stream` suffice; FOREVER if no step reads more."""
        steps = bisect_right(range(FOREVER), length, key=lambda step: self.consumed(stream, step))
        return steps if steps == FOREVER else steps - 1

    def steps_to(self, stream: int, length: int) -> int:
        """Steps after which `length` sequences of `stream` are read; FOREVER if they never are."""
        return bisect_left(range(FOREVER), length, key=lambda step: self.consumed(stream, step))

    def _readers(self, stream: int, step: int) -> int:
        active = self.participation.active(step)
        return active if self.shared else int(stream < active)

    def _rows(self, start: int, stop: int) -> int:
        """Rows of an island in steps `start` to `stop - 1`, if it trains in all of them."""
        offset = self.batches.global_data_offset_by_step
        return (offset(stop) - offset(start)) // self.participation.num_islands


class Shard[T](AsyncDataset[T]):
    """Of each run of `period` sequences of a dataset those from `start` to `stop - 1`."""

    def __init__(self, dataset: AsyncDataset[T], period: int, start: int, stop: int):
        self.dataset = dataset
        self.period = period
        self.start, self.stop = start, stop

    def is_finite(self) -> bool:
        return self.dataset.is_finite()

    async def async_len(self) -> int:
        runs, rest = divmod(await self.dataset.async_len(), self.period)
        return runs * (self.stop - self.start) + min(max(rest - self.start, 0), self.stop - self.start)

    async def get_batch(self, indices: Sequence[int]) -> Sequence[T]:
        places = [divmod(index, self.stop - self.start) for index in indices]
        return await self.dataset.get_batch([run * self.period + self.start + place for run, place in places])


class IslandRows[T](AsyncDataset[T]):
    """The loader's stream, put together from the streams of the islands or from one that they share.

    Args:
        streams: One for each island, or the shared one alone.
        rows: What of them stands where.
        to_all_ends: Whether a finite stream is read past its end, as the host's mixture can be, until all have
            ended; else the data ends with the last step that all can fill.
    """

    def __init__(self, streams: Sequence[AsyncDataset[T]], rows: Rows, *, to_all_ends: bool):
        self.streams = streams
        self.rows = rows
        self.to_all_ends = to_all_ends

    def is_finite(self) -> bool:
        return self._num_steps < FOREVER

    async def async_len(self) -> int:
        if not self.is_finite():
            raise ValueError("the data of the islands has no end")
        return self.rows.batches.global_data_offset_by_step(self._num_steps)

    async def get_batch(self, indices: Sequence[int]) -> Sequence[T]:
        places = [self.rows.locate(index) for index in indices]
        positions: dict[int, list[int]] = defaultdict(list)
        for stream, position in places:
            positions[stream].append(position)
        # One read for each stream: a stream may have to fetch a chunk for it.
        found = await asyncio.gather(*(self.streams[stream].get_batch(read) for stream, read in positions.items()))
        items = {stream: iter(batch) for stream, batch in zip(positions, found, strict=True)}
        return [next(items[stream]) for stream, _ in places]

    @cached_property
    def _num_steps(self) -> int:
        steps, last = (self.rows.steps_to, max) if self.to_all_ends else (self.rows.steps_within, min)
        return last(
            steps(number, blocking_wait(stream.async_len())) if stream.is_finite() else FOREVER
            for number, stream in enumerate(self.streams)
        )
