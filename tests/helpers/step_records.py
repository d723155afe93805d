"""Records of steps, as a trainer makes them."""

from collections.abc import Mapping

from levanter_diloco.training.metrics import IslandRecord, StepRecord


def record(losses: Mapping[int, float], sent: int = 0, active: int = 2) -> StepRecord:
    return StepRecord({island: IslandRecord(loss) for island, loss in losses.items()}, {}, sent, active)
