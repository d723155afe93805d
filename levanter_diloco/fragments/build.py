"""Builds the partition that the options name."""

from collections.abc import Mapping

from ..options.config import DiLoCoConfig
from .balanced import BalancedPartition
from .layers import LayerPartition
from .partition import Partition


def build_partition(diloco: DiLoCoConfig, sharding: Mapping[str, int]) -> Partition:
    """Returns the partition of a run.

    Args:
        diloco: The block.
        sharding: Over how many devices of an island each named axis of a parameter is split, where it is.
    """
    if diloco.partition == "balanced":
        return BalancedPartition(diloco.num_fragments, sharding)
    return LayerPartition(diloco.num_fragments, diloco.layer_order)
