"""The inner step: the host's own training step, once for every island."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
from haliax import Axis, NamedArray
from haliax.types import IntScalar
from haliax.util import is_named_array
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree
from levanter.trainer import Trainer
from levanter.trainer_state import trainables_only

from ..axes import ISLAND, with_island, without_island
from ..host.attention import splash_on_manual_mesh
from ..host.constants import constants_outside_the_mesh
from ..host.embedding import gathered_lookups
from ..host.moe import experts_by_shard
from .state import DiLoCoState, Islands, frozen_only, island_state


class InnerReport(NamedTuple):
    """What the islands say of one inner step; every array leads with the island axis and stays on its island."""

    loss: PyTree[Array]  # PyTree: or a sharding for it, like the others
    loss_metrics: PyTree[Array]
    hook_infos: PyTree


def inner_step(
    trainer: Trainer, state: DiLoCoState, batch: PyTree, *, islands_per_slot: int, hooks: bool
) -> tuple[Islands, InnerReport]:
    """Runs `trainer`'s training step on every island with its own rows of the batch.

    A shard_map that is manual over `diloco` alone: the FSDP and tensor axes stay automatic, so inside an
    island the host's step runs as it always does. Nothing crosses between islands.

    Args:
        trainer: A host trainer for one island: its batch, its mesh axes, the run's hooks.
        state: Its `model` gives the frozen leaves; Theta is not looked at.
        batch: The arguments and keyword arguments of the loss, with a batch axis over `diloco`; island k
            gets rows `[kB/K, (k+1)B/K)`.
        islands_per_slot: Islands on one slot of the mesh axis; they run one after another.
        hooks: Whether to run the jit hooks.
    """
    Batch = str(trainer.config.batch_axis_name)  # the options are refused where it is None
    # Frozen leaves lie on every island alike and enter whole; they have no copy for each island.
    arrays, static = eqx.partition(frozen_only(state.model, state.is_trainable), eqx.is_array)

    def island_step(island: Islands, model: PyTree, step: IntScalar, batch: PyTree) -> tuple[Islands, InnerReport]:
        # To the host it is an ordinary run on the devices of one island.
        host = island_state(state, island, eqx.combine(model, static), trainer.optimizer, step)
        result = trainer._train_step(host, *batch, _no_hooks=not hooks)
        new = result.new_state
        params = trainables_only(new.model, state.is_trainable)
        report = InnerReport(result.loss, result.loss_metrics, result.hook_infos)
        island = dataclasses.replace(island, params=params, opt_state=new.opt_state, key=new.training_key)
        return island, report

    def slot_step(islands: Islands, model: PyTree, step: IntScalar, batch: PyTree) -> tuple[Islands, InnerReport]:
        # Inside the manual axis a slot sees its own rows only.
        rows = _rows(batch, Batch, islands_per_slot)
        return _each(lambda island, rows: island_step(island, model, step, rows), islands_per_slot)(islands, rows)

    split = PartitionSpec(ISLAND)
    with (
        constants_outside_the_mesh(),
        gathered_lookups(trainer.config, ISLAND),
        splash_on_manual_mesh(),
        experts_by_shard(),
    ):
        return jax.shard_map(
            slot_step,
            in_specs=(split, PartitionSpec(), PartitionSpec(), _batch_specs(batch, Batch)),
            out_specs=split,
            axis_names={ISLAND},
            check_vma=False,  # gradients are taken inside one island, never across the manual axis
        )(state.islands, arrays, state.step, batch)


def _each(fn: Callable[..., PyTree], count: int) -> Callable[..., PyTree]:
    """Calls `fn` on each of `count` slices of the leading island axis and stacks what it returns."""

    def call(args: tuple) -> PyTree:
        return fn(*jax.tree.map(without_island, args, is_leaf=is_named_array))

    def mapped(*args: PyTree) -> PyTree:
        if count == 1:
            out = jax.tree.map(lambda x: x[None], call(jax.tree.map(lambda x: x[0], args)))
        else:
            # One after another, not vmapped: as fast on the CPUs where it was measured, and the activations of one
            # island at a time.
            out = jax.lax.map(call, args)
        return jax.tree.map(with_island, out, is_leaf=is_named_array)

    return mapped


def _rows(batch: PyTree, Batch: str, count: int) -> PyTree:
    """Cuts the batch axis of this slot's rows into a leading island axis, of size `count`."""

    def cut(x: NamedArray) -> NamedArray:
        if Batch not in x.axis_names:
            return x.broadcast_axis(Axis(ISLAND, count))
        axes = (Axis(ISLAND, count), Axis(Batch, x.axis_size(Batch) // count))
        return x.unflatten_axis(Batch, axes).rearrange((ISLAND, ...))

    return jax.tree.map(cut, batch, is_leaf=is_named_array)


def _batch_specs(batch: PyTree, Batch: str) -> PyTree:
    def spec(x: NamedArray) -> PartitionSpec:
        return PartitionSpec(*(ISLAND if name == Batch else None for name in x.axis_names))

    return jax.tree.map(spec, batch, is_leaf=is_named_array)
