"""Builds the sync of a run from its options."""

import optax

from ..algorithm.codecs import wire_format
from ..fragments.partition import Partition
from ..islands.all_reduce import AllReduce
from ..islands.guard import Guard
from ..islands.sync import Sync
from .config import DiLoCoTrainerConfig


def build_sync(config: DiLoCoTrainerConfig, partition: Partition, inner: optax.GradientTransformation) -> Sync:
    """Returns the sync of a run.

    Args:
        config: The trainer's options.
        partition: The run's fragments.
        inner: The inner optimizer.
    """
    diloco, schedule = config.diloco, config.diloco.schedule
    # A fragment syncs once a period, begun ones included, and once more in the final sync.
    outer_steps = -(-config.num_train_steps // schedule.effective_period) + diloco.final_sync
    placement = config.placement
    return Sync(
        partition=partition,
        optimizer=diloco.outer.build(outer_steps),
        mixing_alpha=diloco.mixing_alpha,
        all_reduce=AllReduce(
            mesh=config.device_mesh,
            mapping=config.parameter_axis_mapping,
            wire=wire_format(diloco.wire, diloco.wire_block, diloco.wire_rounding == "stochastic"),
            num_pieces=schedule.num_pieces,
            sharded=placement.sharded,
        ),
        placement=placement,
        inner_optimizer=inner,
        guard=Guard(diloco.guard, diloco.guard_factor),
    )
