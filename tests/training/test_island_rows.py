"""Which sequence stands in which row: by hand, then for any schedule, then through the host's loader."""

from collections.abc import Sequence
from itertools import islice

import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from levanter.data.dataset import AsyncDataset, ListAsyncDataset
from levanter.data.mixture import MixtureDataset
from levanter.schedule import BatchSchedule, ScheduleStep

from helpers.toy_model import entered, toy_loss, trainer_config
from levanter_diloco.algorithm.participation import Participation
from levanter_diloco.algorithm.schedule import Schedule
from levanter_diloco.training.island_rows import IslandRows, Rows

GROWING = [ScheduleStep(0, 4), ScheduleStep(2, 8)]
JOINING = ((0, 1), (2, 2))
"""Island 1 joins after two steps."""


def rows_of(islands: int, batch: int | list, *, shared: bool, counts: Sequence[tuple[int, int]] = ()) -> Rows:
    participation = Participation(islands, Schedule(1, 1, 0), counts=tuple(counts))
    return Rows(participation, BatchSchedule(batch), shared)


def located(rows: Rows, step: int) -> list[list[tuple[int, int]]]:
    """`[island]`: the stream and position of each of its rows in `step`."""
    places = [rows.locate(index) for index in rows.batches.batch_indices_at_step(step)]
    size = len(places) // rows.participation.num_islands
    return [places[start : start + size] for start in range(0, len(places), size)]


def test_islands_share_one_stream_by_hand():
    rows = rows_of(2, 4, shared=True)
    assert located(rows, 0) == [[(0, 0), (0, 1)], [(0, 2), (0, 3)]]
    assert located(rows, 1) == [[(0, 4), (0, 5)], [(0, 6), (0, 7)]]


def test_shared_rows_of_an_absent_island_by_hand():
    rows = rows_of(2, 4, shared=True, counts=JOINING)
    assert located(rows, 0) == [[(0, 0), (0, 1)], [(0, 0), (0, 1)]]
    assert located(rows, 1) == [[(0, 2), (0, 3)], [(0, 2), (0, 3)]]
    assert located(rows, 2) == [[(0, 4), (0, 5)], [(0, 6), (0, 7)]]


def test_own_streams_by_hand():
    rows = rows_of(2, 4, shared=False)
    assert located(rows, 0) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    assert located(rows, 3) == [[(0, 6), (0, 7)], [(1, 6), (1, 7)]]


def test_own_stream_starts_when_its_island_joins_by_hand():
    rows = rows_of(2, 4, shared=False, counts=JOINING)
    assert located(rows, 1) == [[(0, 2), (0, 3)], [(0, 2), (0, 3)]]
    assert located(rows, 2) == [[(0, 4), (0, 5)], [(1, 0), (1, 1)]]


def test_batch_schedule_by_hand():
    own, shared = (rows_of(2, GROWING, shared=shared) for shared in (False, True))
    assert located(own, 1) == [[(0, 2), (0, 3)], [(1, 2), (1, 3)]]
    assert located(own, 2)[1] == [(1, 4), (1, 5), (1, 6), (1, 7)]
    assert located(own, 3)[1] == [(1, 8), (1, 9), (1, 10), (1, 11)]
    assert [position for island in located(shared, 3) for _, position in island] == list(range(16, 24))


def rising(first: int, then: st.SearchStrategy) -> st.SearchStrategy:
    """`[(step, value), ...]` from step `first` on, the steps rising."""
    return st.dictionaries(st.integers(1, 12), then, max_size=3).flatmap(
        lambda later: then.map(lambda value: [(first, value), *sorted(later.items())])
    )


@settings(deadline=None, max_examples=60)
@given(
    counts=rising(0, st.integers(1, 3)),
    batches=rising(0, st.integers(1, 3)),
    shared=st.booleans(),
)
def test_every_stream_is_read_once_and_in_order(counts: list, batches: list, shared: bool):
    rows = rows_of(3, [ScheduleStep(step, 3 * size) for step, size in batches], shared=shared, counts=counts)
    read: dict[int, list[int]] = {stream: [] for stream in range(1 if shared else 3)}
    for step in range(16):
        active = rows.participation.active(step)
        places = located(rows, step)
        for stream, position in (place for island in places[:active] for place in island):
            read[stream].append(position)
        assert {place for island in places[active:] for place in island} <= {
            place for island in places[:active] for place in island
        }
    for stream, positions in read.items():
        assert positions == list(range(rows.consumed(stream, 16)))


def test_all_islands_present_read_the_host_s_stream():
    rows = rows_of(3, [ScheduleStep(0, 3), ScheduleStep(5, 9)], shared=True, counts=((0, 3), (4, 3)))
    assert [rows.locate(index) for index in range(200)] == [(0, index) for index in range(200)]


def test_absent_island_consumes_no_data():
    for shared, streams in ((True, 1), (False, 2)):
        rows = rows_of(2, 4, shared=shared, counts=((0, 2), (3, 1), (6, 2)))
        before, after = ([rows.consumed(stream, step) for stream in range(streams)] for step in (3, 6))
        trained = [end - start for start, end in zip(before, after, strict=True)]
        assert trained == ([6] if shared else [6, 0])  # three steps of two rows, of island 0


def ids(start: int, count: int) -> AsyncDataset[np.int32]:
    return ListAsyncDataset([np.int32(i) for i in range(start, start + count)])


def endless(start: int, count: int, stop_strategy: str = "restart") -> MixtureDataset:
    datasets = {"only": ids(start, count)}
    return MixtureDataset(datasets, {"only": 1.0}, 4, key=0, randomize_blocks=False, stop_strategy=stop_strategy)


def read(dataset: AsyncDataset, indices: Sequence[int]) -> list[int]:
    return [int(item) for item in dataset.as_sync_dataset().get_batch(indices)]


def test_streams_without_end_have_none_together():
    dataset = IslandRows([endless(0, 4), endless(100, 6)], rows_of(2, 4, shared=False), to_all_ends=False)
    assert not dataset.is_finite()
    with pytest.raises(ValueError, match="has no end"):
        dataset.as_sync_dataset().__len__()
    # epochs of 4 and 6: each island starts its own over
    assert read(dataset, range(16)) == [0, 1, 100, 101, 2, 3, 102, 103, 0, 1, 104, 105, 2, 3, 100, 101]


def test_data_ends_with_the_last_step_that_all_islands_can_fill():
    streams = [endless(0, 9, "first_exhausted"), endless(100, 5, "first_exhausted")]
    dataset = IslandRows(streams, rows_of(2, 4, shared=False), to_all_ends=False)
    assert len(dataset.as_sync_dataset()) == 8  # two steps of two rows: a third needs six sequences of island 1
    assert read(dataset, range(8)) == [0, 1, 100, 101, 2, 3, 102, 103]


def test_data_ends_when_the_last_island_has_read_all():
    streams = [endless(0, 9, "all_exhausted"), endless(100, 5, "all_exhausted")]
    dataset = IslandRows(streams, rows_of(2, 4, shared=False), to_all_ends=True)
    assert len(dataset.as_sync_dataset()) == 20  # five steps, the last half of island 0's second time around
    assert read(dataset, range(16, 20)) == [8, 0, 103, 104]


def test_data_that_an_absent_island_does_not_read_never_ends():
    streams = [endless(0, 9, "all_exhausted"), endless(100, 5, "all_exhausted")]
    rows = rows_of(2, 4, shared=False, counts=((0, 1),))
    assert not IslandRows(streams, rows, to_all_ends=True).is_finite()
    assert len(IslandRows(streams, rows, to_all_ends=False).as_sync_dataset()) == 16  # four steps of island 0


def test_shared_data_ends_later_while_islands_are_absent():
    stream, rows = endless(0, 9, "first_exhausted"), rows_of(2, 4, shared=True, counts=JOINING)
    # two steps of two rows, then one of four: a fourth step would need 12 sequences
    assert len(IslandRows([stream], rows, to_all_ends=False).as_sync_dataset()) == 12


@pytest.mark.parametrize("shared", [False, True])
def test_rows_of_a_batch_keep_their_order_and_their_place_after_a_resume(shared: bool, tmp_path):
    # Island k must find rows [kB/K, (k+1)B/K) on its own devices, from any step on.
    counts = ((0, 2), (1, 4), (6, 3))
    streams = [endless(100 * k, 10 + k) for k in range(1 if shared else 4)]
    rows = rows_of(4, [ScheduleStep(0, 16), ScheduleStep(3, 32)], shared=shared, counts=counts)
    dataset = IslandRows(streams, rows, to_all_ends=False)
    config = trainer_config(
        tmp_path, {"ici_islands": 2, "islands_per_slot": 2}, train_batch_size=rows.batches.schedule
    )
    with entered(config, optax.sgd(1.0), toy_loss) as trainer:
        assert trainer.config.islands.num_islands == 4
        loader = trainer.data_loader(dataset)
        straight = list(islice(loader.iter_from_step(0), 9))
        for step, batch in enumerate(straight):
            expected = read(dataset, rows.batches.batch_indices_at_step(step))
            assert batch.tolist() == expected
            slots = trainer.device_mesh.devices.reshape(2, -1)
            for shard in batch.addressable_shards:
                slot = next(k for k in range(2) if shard.device in slots[k])
                half = len(expected) // 2
                assert slot * half <= shard.index[0].start < shard.index[0].stop <= (slot + 1) * half
        for start in (1, 3, 5, 7):
            resumed = list(islice(loader.iter_from_step(start), 9 - start))
            for again, first in zip(resumed, straight[start:], strict=True):
                np.testing.assert_array_equal(again, first)
