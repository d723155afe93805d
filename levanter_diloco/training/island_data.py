"""The training data of islands, `trainer.diloco.island_data`: the host's training set, dealt to them."""

import copy
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import jax
from haliax import Axis
from jaxtyping import PRNGKeyArray
from levanter.data.dataset import AsyncDataset
from levanter.data.mixture import MixtureDataset, StopStrategy
from levanter.data.text.datasets import LmDataConfig, NamedLmDataset
from levanter.models.lm_model import LmExample
from levanter.schedule import BatchSchedule

from ..errors import PATH, OptionError, option_error
from .config import DiLoCoTrainerConfig
from .island_rows import IslandRows, Rows, Shard

Weights = dict[str, float]

Datasets = Mapping[str, AsyncDataset[Any]]  # Any: the host's unnamed examples


def dealt(data: LmDataConfig, trainer: DiLoCoTrainerConfig) -> LmDataConfig:
    """The host's options of the data with a `train_set` that reads what `trainer.diloco` gives to each island.

    They are `data` itself where that is the host's own training set. Evaluation sets stay the host's.

    Raises:
        OptionError: If the options of the data and of the islands do not fit each other.
    """
    diloco = trainer.diloco
    if diloco.island_data == "shared" and diloco.schedule_islands is None:
        return data
    if data.prior_context_phases:
        option = "schedule_islands" if diloco.island_data == "shared" else "island_data"
        raise OptionError(
            f"data.prior_context_phases ({len(data.prior_context_phases)} phases) does not work with {PATH}.{option}: "
            "it counts on the host's own order of the data; leave it out."
        )
    if not isinstance(diloco.island_data, str):
        unknown = {name for weights in diloco.island_data for name in weights} - data.components.keys()
        if unknown:
            known = ", ".join(data.components)
            raise option_error("island_data", ", ".join(sorted(unknown)), "name data.components", known)
    own = copy.copy(data)
    # The dataclass is frozen. Its methods stay those of the user's class, but for this one.
    object.__setattr__(own, "train_set", functools.partial(train_set, data, trainer))
    return own


def train_set(
    data: LmDataConfig,
    trainer: DiLoCoTrainerConfig,
    Pos: Axis,
    batch_schedule: BatchSchedule,
    *,
    key: PRNGKeyArray,
) -> AsyncDataset[LmExample]:
    """The stream of global batches in which island k finds its sequences in the k-th part of each batch.

    Raises:
        OptionError: If the data cannot be dealt to the islands.
    """
    shared = trainer.diloco.island_data == "shared"
    rows = Rows(trainer.participation, batch_schedule, shared)
    to_all_ends = data.stop_strategy == StopStrategy.ALL_STOP_STRATEGY
    if shared:
        return IslandRows([data.train_set(Pos, batch_schedule, key=key)], rows, to_all_ends=to_all_ends)
    return NamedLmDataset(IslandRows(mixtures(data, trainer, Pos, rows, key), rows, to_all_ends=to_all_ends), Pos)


def mixtures(
    data: LmDataConfig, trainer: DiLoCoTrainerConfig, Pos: Axis, rows: Rows, key: PRNGKeyArray
) -> list[MixtureDataset]:
    """The host's mixture for each island, of its shards and with its weights."""
    mix_key, shuffle_key = jax.random.split(key)
    own = trainer.diloco.island_data
    if not isinstance(own, str):
        # The host builds what has a weight.
        total = {name: sum(weights.get(name, 0.0) for weights in own) for name in data.components}
        data = dataclasses.replace(data, train_weights=total)
    initial_batch_size = rows.batches.batch_size_at_step(0)
    datasets = data.train_sets(Pos, initial_batch_size=initial_batch_size, key=shuffle_key)
    islands = range(rows.participation.num_islands)
    if isinstance(own, str):
        shards = deal(datasets, [dict.fromkeys(datasets, 1.0)] * len(islands), in_turn=True)
        weights = [_stages(data, rows, k) for k in islands]
    else:
        shards, weights = deal(datasets, own, in_turn=False), own
    return [
        MixtureDataset(
            shards[k],
            weights[k],
            data.mixture_block_size,
            # One component has no turns to shuffle; in its own order it reads on where K changes.
            randomize_blocks=len(shards[k]) > 1,
            key=jax.random.fold_in(mix_key, k),
            stop_strategy=data.stop_strategy,
        )
        for k in islands
    ]


def deal(
    datasets: Datasets, weights: Sequence[Mapping[str, float]], *, in_turn: bool
) -> list[dict[str, AsyncDataset]]:
    """Cuts each dataset into one shard for each island that has a weight for it.

    Shards are disjoint, make up the dataset, and are as long as the islands' shares for it: of an island's own
    reading, so that all islands come to the end of their shards together.

    Args:
        datasets: The components in the order in which the host reads them, shuffled.
        weights: The mixture of each island.
        in_turn: Whether islands of equal shares take one sequence each, over and over, so that what is read by a
            step does not depend on how many they are; else an island takes a run of neighbours.

    Raises:
        OptionError: If a dataset has no sequence for an island with a weight for it.
    """
    shards: list[dict[str, AsyncDataset]] = [{} for _ in weights]
    for name, dataset in datasets.items():
        if not dataset.is_finite() and not in_turn:
            raise OptionError(
                f"data.components.{name} has no end and cannot be cut; {PATH}.island_data: shared works."
            )
        # Exact: floats could give two neighbours the same bound, and lose a sequence between them.
        shares = [Fraction(own.get(name, 0)) / sum(map(Fraction, own.values())) for own in weights]
        period = len(weights) if in_turn else len(dataset.as_sync_dataset())
        bounds = [round(period * share / sum(shares)) for share in accumulate(shares, initial=Fraction(0))]
        for k, (start, stop) in enumerate(pairwise(bounds)):
            if shares[k] == 0:
                continue
            shard = Shard(dataset, period, start, stop)
            if shard.is_finite() and len(shard.as_sync_dataset()) == 0:
                raise OptionError(
                    f"data.components.{name} ({len(dataset.as_sync_dataset())} sequences) must have one for each "
                    f"island that {PATH}.island_data gives a share of it, and island {k} would have none; more text, "
                    "fewer islands or island_data: shared works."
                )
            shards[k][name] = shard
    return shards


def _stages(data: LmDataConfig, rows: Rows, island: int) -> Weights | list[tuple[int, Weights]]:
    """`data.train_weights`, whose steps become positions in the stream of the island."""
    weights = data.train_weights
    assert weights is not None  # the host fills them in
    if isinstance(weights, dict):
        return weights
    # Of the stages that end before the island has read anything, the last one counts.
    stages = {rows.consumed(island, step): stage for step, stage in weights}
    block = data.mixture_block_size
    if (works := math.gcd(block, *stages)) != block:
        raise OptionError(
            f"data.mixture_block_size ({block}) must divide the sequences that an island has read where "
            f"data.train_weights change, {list(stages)[1:]} on island {island}; {works} works."
        )
    return list(stages.items())
