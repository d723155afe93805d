"""The host's training loop, handed to a function in the place of its own caller."""

from collections.abc import Callable, Iterator
from typing import Any

from levanter.callbacks import StepInfo
from levanter.trainer import Trainer


def hand_steps_to(consume: Callable[[Iterator[StepInfo]], None]) -> None:
    """Lets `consume` draw the steps of every trainer from now on; it does not return."""
    host_steps = Trainer.training_steps

    def training_steps(self: Trainer, *args: Any) -> None:  # Any: as the host's
        consume(host_steps(self, *args))

    Trainer.training_steps = training_steps  # pyrefly: ignore[bad-assignment]  it does not return
