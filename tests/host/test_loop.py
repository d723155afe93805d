"""The host's loop, whose steps go to a function of ours."""

from typing import Any

import pytest
from levanter.trainer import Trainer

from levanter_diloco.host.loop import hand_steps_to


def test_steps_are_drawn_by_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def training_steps(self: Trainer, state: int, loader: Any) -> Any:
        yield from (state + batch for batch in loader)

    monkeypatch.setattr(Trainer, "training_steps", training_steps)  # and the host's own after the test
    seen: list[Any] = []
    hand_steps_to(lambda steps: seen.append([next(steps), next(steps)]))
    trainer: Any = object.__new__(Trainer)
    trainer.training_steps(10, iter([1, 2, 3]))
    assert seen == [[11, 12]]
