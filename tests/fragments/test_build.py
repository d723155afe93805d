"""The partition that the options name."""

from levanter_diloco.fragments.balanced import BalancedPartition
from levanter_diloco.fragments.build import build_partition
from levanter_diloco.fragments.layers import LayerPartition
from levanter_diloco.options.config import DiLoCoConfig


def test_layers_in_their_order() -> None:
    block = DiLoCoConfig(num_fragments=5, layer_order="sequential")
    assert build_partition(block, {"embed": 4}) == LayerPartition(5, "sequential")


def test_balanced_heeds_the_sharding() -> None:
    partition = build_partition(DiLoCoConfig(num_fragments=7, partition="balanced"), {"embed": 4})
    assert isinstance(partition, BalancedPartition)
    assert partition.num_fragments == 7 and partition.sharding == {"embed": 4}
