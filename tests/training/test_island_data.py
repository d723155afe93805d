"""`trainer.diloco.island_data`: which sequences of the host's training set each island reads, by their ids."""

import dataclasses
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from haliax import Axis
from levanter.data.dataset import AsyncDataset, ListAsyncDataset
from levanter.data.text.datasets import (
    BlockShuffleConfig,
    ContextPhaseConfig,
    DatasetComponentBase,
    DirectDatasetComponent,
    LmDataConfig,
)
from levanter.data.text.examples import GrugLmExample
from levanter.schedule import BatchSchedule, ScheduleStep
from tokenizers import Tokenizer

from helpers.command_runs import Workplace, arrays, checkpoint
from helpers.toy_model import trainer_config
from levanter_diloco.errors import OptionError
from levanter_diloco.training.island_data import deal, dealt

Pos = Axis("position", 4)
KEY = jax.random.PRNGKey(7)
SIZES = {"web": 20, "code": 12}


class Numbered(AsyncDataset[GrugLmExample]):
    """Sequences of one token each, which is their id."""

    def __init__(self, start: int, count: int, *, finite: bool = True):
        self.start, self.count, self.finite = start, count, finite

    def is_finite(self) -> bool:
        return self.finite

    async def async_len(self) -> int:
        return self.count

    async def get_batch(self, indices: Sequence[int]) -> Sequence[GrugLmExample]:
        assert all(0 <= index < self.count for index in indices)
        return [GrugLmExample.causal(jnp.full(Pos.size, self.start + index, jnp.int32)) for index in indices]


def text(sizes: Mapping[str, int] = SIZES, **options: Any) -> LmDataConfig:
    """Components of the given sizes; ids of the first start at 0, of the second at 100, and so on."""
    components: dict[str, DatasetComponentBase] = {
        name: DirectDatasetComponent({"train": Numbered(100 * i, size)})
        for i, (name, size) in enumerate(sizes.items())
    }
    defaults: dict[str, Any] = {
        "tokenizer": "passthrough",
        "vocab_size": 1000,
        "mixture_block_size": 8,
        "shuffle": True,
    }
    return LmDataConfig(components=components, **(defaults | options))


@dataclasses.dataclass
class Reading:
    """What the loader finds, as ids of sequences."""

    data: LmDataConfig
    diloco: dict[str, Any]
    batch: int | list[ScheduleStep[int]] = 8
    islands: int = 2

    def __post_init__(self) -> None:
        trainer = trainer_config(Path(), {"ici_islands": 1, "islands_per_slot": self.islands, **self.diloco})
        self.batches = BatchSchedule(self.batch)
        self.train_set = dealt(self.data, trainer).train_set(Pos, self.batches, key=KEY).as_sync_dataset()

    def step(self, step: int) -> list[list[int]]:
        """`[island]`: the ids of its rows."""
        examples = self.train_set.get_batch(self.batches.batch_indices_at_step(step))
        ids = [int(example.tokens.array[0]) for example in examples]
        rows = len(ids) // self.islands
        return [ids[start : start + rows] for start in range(0, len(ids), rows)]

    def steps(self, start: int, stop: int) -> list[list[int]]:
        """`[island]`: the ids of its rows in these steps, in order."""
        return [flat(rows) for rows in zip(*map(self.step, range(start, stop)), strict=True)]


def flat(parts: Iterable[list]) -> list:
    return list(chain.from_iterable(parts))


def ids_of(sizes: Mapping[str, int] = SIZES) -> set[int]:
    return {100 * i + j for i, size in enumerate(sizes.values()) for j in range(size)}


def of_component(read: Sequence[int], component: int) -> Counter[int]:
    return Counter(i for i in read if i // 100 == component)


def assert_parts(parts: Sequence[Collection[int]], whole: set[int]) -> None:
    """`parts` have nothing in common and make up `whole`."""
    assert set().union(*parts) == whole
    assert sum(len(set(part)) for part in parts) == len(whole)


@pytest.mark.parametrize("islands", [2, 4])
def test_shards_are_disjoint_and_make_up_the_set_over_epochs(islands: int):
    reading = Reading(text(), {"island_data": "sharded"}, batch=4 * islands, islands=islands)
    read = reading.steps(0, 30)  # 60 rows of each component for each island
    assert_parts(read, ids_of())
    for component, size in enumerate(SIZES.values()):
        for island in read:
            epochs = of_component(island, component)
            assert len(epochs) == size // islands
            assert set(epochs.values()) == {60 * islands // size}


def test_shards_of_a_batch_schedule():
    reading = Reading(text(), {"island_data": "sharded"}, batch=[ScheduleStep(0, 4), ScheduleStep(4, 8)])
    read = reading.steps(0, 32)
    assert [len(island) for island in read] == [4 * 2 + 28 * 4] * 2
    assert_parts(read, ids_of())
    assert set(of_component(read[0], 0).values()) == {6}  # 60 rows of 10 sequences: none is skipped where B grows


def test_pieces_are_dealt_in_proportion_by_hand():
    weights = [{"a": 1.0, "b": 1.0}, {"a": 3.0, "b": 1.0}, {"b": 5.0}]
    # of island 0 half is a, of island 1 three quarters: 10 sequences of a are cut 4 to 6
    # b is 1/2, 1/4 and all of them: 14 are cut 4 to 2 to 8
    datasets = {name: ListAsyncDataset([f"{name}{i}" for i in range(size)]) for name, size in (("a", 10), ("b", 14))}
    pieces = deal(datasets, weights, in_turn=False)
    assert [{name: len(piece.as_sync_dataset()) for name, piece in own.items()} for own in pieces] == [
        {"a": 4, "b": 4},
        {"a": 6, "b": 2},
        {"b": 8},
    ]
    assert pieces[1]["a"].as_sync_dataset()[0] == "a4"
    assert pieces[2]["b"].as_sync_dataset()[7] == "b13"


def test_islands_take_sequences_in_turn_by_hand():
    # Of a set without an end, too; in order, because it is not shuffled.
    components: dict[str, DatasetComponentBase] = {
        "web": DirectDatasetComponent({"train": Numbered(0, 16, finite=False)})
    }
    data = LmDataConfig(tokenizer="passthrough", vocab_size=99, shuffle=False, components=components)
    reading = Reading(data, {"island_data": "sharded"})
    assert [reading.step(step) for step in range(2)] == [
        [[0, 2, 4, 6], [1, 3, 5, 7]],
        [[8, 10, 12, 14], [9, 11, 13, 15]],
    ]


def test_own_mixtures_deal_disjoint_parts_that_make_up_the_set():
    mixtures = [{"web": 1.0, "code": 1.0}, {"web": 1.0, "code": 0.0}]
    read = Reading(text(), {"island_data": mixtures}).steps(0, 40)
    assert_parts(read, ids_of())
    # 160 rows each: web is dealt 1 to 2 (7 and 13 of 20), code to island 0 alone
    assert [of_component(island, 0).total() for island in read] == [80, 160]
    assert [len(of_component(island, 0)) for island in read] == [7, 13]
    assert [len(of_component(island, 1)) for island in read] == [12, 0]


def test_own_mixtures_may_use_what_the_shared_mixture_leaves_out():
    data = text(train_weights={"web": 1.0})
    read = Reading(data, {"island_data": [{"web": 1.0}, {"code": 1.0}]}).steps(0, 12)
    assert [set(island) for island in read] == [set(range(20)), set(range(100, 112))]


def test_batches_of_the_islands_are_disjoint_and_make_up_the_data_parallel_batch():
    # The same shuffle seed on every worker would give all of them the same sequences.
    data = text({"web": 64})
    stock = data.train_set(Pos, BatchSchedule(8), key=KEY).as_sync_dataset()
    reading = Reading(data, {"island_data": "shared"})
    for step in range(8):
        batch = [int(example.tokens.array[0]) for example in stock.get_batch(range(8 * step, 8 * step + 8))]
        assert_parts(reading.step(step), set(batch))
        assert flat(reading.step(step)) == batch


def test_no_two_islands_have_the_same_shuffle():
    assert_parts(Reading(text({"web": 64}), {"island_data": "sharded"}).steps(0, 8), ids_of({"web": 64}))
    turns = [[i // 100 for i in island] for island in Reading(text(), {"island_data": "sharded"}).steps(0, 8)]
    assert turns[0] != turns[1]


def test_islands_do_not_each_train_on_the_whole_set():
    # Workers that each run the whole schedule would train on K times the tokens of data parallelism.
    data = text({"web": 64})
    stock = data.train_set(Pos, BatchSchedule(8), key=KEY).as_sync_dataset().get_batch(range(64))
    for island_data in ("shared", "sharded"):
        read = Reading(data, {"island_data": island_data}).steps(0, 8)
        assert Counter(flat(read)) == Counter(int(example.tokens.array[0]) for example in stock)


def test_shared_data_is_the_host_s_own():
    data = text()
    assert dealt(data, trainer_config(Path(), {"ici_islands": 2})) is data


def test_shared_data_with_all_islands_present_is_the_host_s_own_stream():
    data = text()
    reading = Reading(data, {"schedule_islands": [[0, 2]]})
    stock = data.train_set(Pos, reading.batches, key=KEY).as_sync_dataset()
    rows = range(40)
    assert [example.tokens.array.tolist() for example in reading.train_set.get_batch(rows)] == [
        example.tokens.array.tolist() for example in stock.get_batch(rows)
    ]


def test_absent_island_leaves_its_share_of_the_shared_stream_to_the_others():
    data = text({"web": 64})
    absent = Reading(data, {"schedule_islands": [[0, 2], [2, 1], [6, 2]]})
    trained = [absent.step(step)[: 1 if 2 <= step < 6 else 2] for step in range(10)]
    stream = flat(flat(trained))
    assert len(stream) == len(set(stream)) == 64  # six whole batches and four halves: nothing twice, nothing lost
    assert absent.step(3)[1] == absent.step(3)[0]


def test_absent_island_comes_back_to_where_it_left_its_shard():
    always = Reading(text(), {"island_data": "sharded"})
    absent = Reading(text(), {"island_data": "sharded", "schedule_islands": [[0, 2], [2, 1], [6, 2]]})
    assert absent.steps(0, 10)[0] == always.steps(0, 10)[0]
    assert absent.steps(0, 2)[1] + absent.steps(6, 10)[1] == always.steps(0, 6)[1]


@pytest.mark.parametrize("island_data", ["shared", "sharded"])
@pytest.mark.parametrize("islands", [1, 3, 4])
def test_position_in_the_data_is_not_lost_when_the_islands_change(island_data: str, islands: int):
    # After three steps of 2 islands the run is resumed on others, with the same global batch.
    data = text({"web": 72})
    before = Reading(data, {"island_data": island_data}, batch=12, islands=2)
    after = Reading(data, {"island_data": island_data}, batch=12, islands=islands)
    read = flat(before.steps(0, 3) + after.steps(3, 6))
    assert len(read) == 72 and set(read) == ids_of({"web": 72})


def test_change_of_the_islands_repeats_less_than_a_block_of_each_component():
    sizes = {"web": 48, "code": 48}
    before, after = (
        Reading(text(sizes, mixture_block_size=6), {"island_data": "sharded"}, batch=12, islands=islands)
        for islands in (2, 4)
    )
    # after four steps an island has read four blocks of six, or two
    assert Counter(flat(before.steps(0, 4) + after.steps(4, 8))) == Counter(ids_of(sizes))
    # after five, five or two and a half: what then is repeated is half a block of four islands
    repeated = 12 * 8 - len(set(flat(before.steps(0, 5) + after.steps(5, 8))))
    assert repeated <= 4 * 3


@pytest.mark.parametrize("island_data", ["sharded", [{"web": 1.0}, {"web": 1.0, "code": 2.0}]])
def test_position_in_the_data_is_not_lost_on_resume(island_data: Any):
    # A process that never read the steps before finds the same sequences.
    batch = [ScheduleStep(0, 4), ScheduleStep(3, 8)]
    diloco = {"island_data": island_data, "schedule_islands": [[0, 1], [2, 2]]}
    straight = Reading(text(), diloco, batch)
    steps = [straight.step(step) for step in range(9)]
    for start in range(9):
        resumed = Reading(text(), diloco, batch)
        assert [resumed.step(step) for step in range(start, 9)] == steps[start:]


def test_mixture_that_changes_during_the_run_changes_for_each_island():
    weights = [(0, {"web": 1.0}), (4, {"code": 1.0})]
    data = text(train_weights=weights)
    read = Reading(data, {"island_data": "sharded"}).steps(0, 8)
    assert [[i // 100 for i in island] for island in read] == [[0] * 16 + [1] * 16] * 2
    # island 1 reads nothing before step 6: by then the first mixture is over
    late = Reading(data, {"island_data": "sharded", "schedule_islands": [[0, 1], [6, 2]]})
    assert [i // 100 for i in late.steps(6, 8)[1]] == [1] * 8


def test_mixture_that_changes_within_a_block_is_refused():
    data = text(train_weights=[(0, {"web": 1.0}), (3, {"code": 1.0})])
    with pytest.raises(OptionError) as error:
        Reading(data, {"island_data": "sharded"})
    assert str(error.value) == (
        "data.mixture_block_size (8) must divide the sequences that an island has read where data.train_weights "
        "change, [12] on island 0; 4 works."
    )


@pytest.mark.parametrize("island_data", ["sharded", [{"web": 1.0}, {"web": 2.0}]])
def test_sequences_that_the_host_holds_back_stay_held_back(island_data: Any):
    held = text({"web": 40}, num_validation_sequences={"web": 8})
    validation = held.validation_sets(Pos)["web"].as_sync_dataset()
    kept = {int(example.tokens.array[0]) for example in validation.get_batch(range(8))}
    assert_parts(Reading(held, {"island_data": island_data}).steps(0, 16), ids_of({"web": 40}) - kept)
    limited = text({"web": 40}, max_train_batches={"web": 2})
    host = limited.train_sets(Pos, initial_batch_size=8, key=jax.random.split(KEY)[1])["web"].as_sync_dataset()
    first = {int(example.tokens[0]) for example in host.get_batch(range(16))}
    assert_parts(Reading(limited, {"island_data": island_data}).steps(0, 16), first)


@pytest.mark.parametrize(("strategy", "steps"), [("first_exhausted", 3), ("all_exhausted", 5)])
def test_data_ends_where_the_host_s_strategy_ends_it(strategy: str, steps: int):
    # An island reads two of each component a step: its 7 of code end within the fourth, its 10 of web with the fifth.
    sizes = {"web": 20, "code": 14}
    reading = Reading(text(sizes, stop_strategy=strategy, mixture_block_size=4), {"island_data": "sharded"})
    assert len(reading.train_set) == 8 * steps
    read = reading.steps(0, steps)
    if strategy == "all_exhausted":
        assert_parts(read, ids_of(sizes))
    else:
        assert len(set(flat(read))) == 24


def test_rest_of_the_data_config_stays_the_host_s_and_the_user_s():
    @dataclasses.dataclass(frozen=True)
    class Own(LmDataConfig):
        def tagged_eval_sets(self, Pos: Axis) -> list:
            return [(self.train_weights, ["own"])]

    data = Own(**{f.name: getattr(text(), f.name) for f in dataclasses.fields(LmDataConfig)})
    config = dealt(data, trainer_config(Path(), {"ici_islands": 2, "island_data": "sharded"}))
    assert config.tagged_eval_sets(Pos) == [({"web": 1.0, "code": 1.0}, ["own"])]
    assert dataclasses.asdict(config).keys() == dataclasses.asdict(data).keys()
    assert "train_set" not in vars(data)


@pytest.mark.parametrize(
    ("data", "diloco", "sentence"),
    [
        (
            text(),
            {"island_data": [{"web": 1.0}, {"books": 1.0, "art": 1.0}]},
            "trainer.diloco.island_data (art, books) must name data.components; web, code works.",
        ),
        (
            text({"web": 20, "code": 1}),
            {"island_data": "sharded"},
            "data.components.code (1 sequences) must have one for each island that trainer.diloco.island_data gives a "
            "share of it, and island 1 would have none; more text, fewer islands or island_data: shared works.",
        ),
        (
            text(),
            {"island_data": [{"web": 1.0}, {"web": 0.001, "code": 1.0}]},
            "data.components.web (20 sequences) must have one for each island that trainer.diloco.island_data gives a "
            "share of it, and island 1 would have none; more text, fewer islands or island_data: shared works.",
        ),
        (
            LmDataConfig(
                tokenizer="passthrough",
                vocab_size=9,
                shuffle=False,
                components={"web": DirectDatasetComponent({"train": Numbered(0, 9, finite=False)})},
            ),
            {"island_data": [{"web": 1.0}, {"web": 1.0}]},
            "data.components.web has no end and cannot be cut; trainer.diloco.island_data: shared works.",
        ),
    ],
)
def test_data_that_cannot_be_dealt_is_refused(data: LmDataConfig, diloco: dict, sentence: str):
    with pytest.raises(OptionError) as error:
        Reading(data, diloco)
    assert str(error.value) == sentence


def test_phases_of_context_are_refused():
    shuffle = BlockShuffleConfig(io_block_size=2, window_blocks=2)
    phase = ContextPhaseConfig(2, seq_len=2, batch_size=8, train_weights=[(0, {"web": 1.0})], shuffle=shuffle)
    for diloco in ({"island_data": "sharded"}, {"schedule_islands": [[0, 1]]}):
        with pytest.raises(
            OptionError, match=r"data\.prior_context_phases \(1 phases\) does not work with .*leave it"
        ):
            dealt(text(shuffle=shuffle, prior_context_phases=[phase]), trainer_config(Path(), diloco))


def test_number_of_mixtures_is_that_of_the_islands(tmp_path: Path):
    config = trainer_config(tmp_path, {"ici_islands": 4, "island_data": [{"web": 1.0}] * 3})
    with pytest.raises(OptionError) as error:
        config._validate_and_set_defaults()
    assert str(error.value) == (
        "trainer.diloco.island_data (3 mixtures) must hold one for each of the 4 islands; a list of 4 works."
    )


BYTES = range(0x80, 0xA0)
"""Each sequence of the two components below repeats a letter of its own: U+0100 + i, in UTF-8 C4 and 80 + i."""


@pytest.fixture(scope="module")
def read_by_islands(workplace: Workplace) -> dict[str, list[set[int]]]:
    """For runs of the real command, the sequences that each island has trained on, by the embeddings it has moved."""
    letters = [chr(0x100 + byte - 0x80) for byte in BYTES]
    components = {}
    for name, own in (("first", letters[:16]), ("second", letters[16:])):
        path = workplace.root / f"{name}.jsonl"
        # 62 tokens, and the space and the end of the text that the host appends, are a sequence.
        path.write_text("".join(json.dumps({"text": letter * 31}) + "\n" for letter in own))
        components[name] = {"source": {"type": "url", "train_urls": [str(path)]}}
    own_mixtures = [{"first": 1.0}, {"first": 1.0, "second": 3.0}]
    configs = {
        name: workplace.config(
            name,
            {"sync_period": 100, "ici_islands": 2, "final_sync": False, "island_data": island_data},
            data__components=components,
            data__cache_dir=str(workplace.root / "letters"),
            data__shuffle=True,
            data__mixture_block_size=8,  # or the host would draw anew within an epoch of so little text
            model__num_layers=1,
            optimizer__weight_decay=0.0,
            trainer__num_train_steps=16,
        )
        for name, island_data in (("sharded", "sharded"), ("own_mixtures", own_mixtures))
    }
    workplace.run_all(*configs.values())
    tokenizer = Tokenizer.from_file(str(workplace.root / "text" / "tokenizer" / "tokenizer.json"))
    tokens = [tokenizer.encode(letter).ids[1] for letter in letters]
    read = {}
    for name, config in configs.items():
        state = checkpoint(config.parent, 15)
        embeddings = "model/embeddings/token_embeddings/weight"
        start = arrays(state, embeddings)[""]
        moved = (arrays(state, embeddings.replace("model", "islands/params"))[""] != start).any(axis=-1)
        read[name] = [{i for i, token in enumerate(tokens) if island[token]} for island in moved]
    return read


@pytest.mark.slow
@pytest.mark.entry
def test_islands_of_a_run_train_on_their_shards_and_no_other(read_by_islands: dict[str, list[set[int]]]) -> None:
    read = read_by_islands["sharded"]
    assert_parts(read, set(range(32)))
    assert [len({i for i in island if i < 16}) for island in read] == [8, 8]


@pytest.mark.slow
@pytest.mark.entry
def test_islands_of_a_run_train_on_mixtures_of_their_own(read_by_islands: dict[str, list[set[int]]]) -> None:
    read = read_by_islands["own_mixtures"]
    assert_parts(read, set(range(32)))
    # of the first component 1 to 1/4: 13 and 3 of 16
    assert [len({i for i in island if i < 16}) for island in read] == [13, 3]
    assert [len({i for i in island if i >= 16}) for island in read] == [0, 16]
