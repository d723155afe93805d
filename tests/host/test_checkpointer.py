"""The host's checkpointer: what it is asked with, and when."""

from pathlib import Path
from typing import Any

import pytest
from levanter.checkpoint import Checkpointer

from levanter_diloco.host.checkpointer import save_along, save_without_barriers


def checkpointer(folder: Path) -> Checkpointer:
    return Checkpointer(str(folder), None, [])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps after which the host's own method has run, which broadcasts."""
    steps: list[int] = []

    def on_step(self: Checkpointer, *, tree: Any, step: int, force: bool = False) -> None:
        steps.append(step)

    monkeypatch.setattr(Checkpointer, "on_step", on_step)
    return steps


def test_others_are_asked_only_where_that_is_allowed(asked: list[int], tmp_path: Path) -> None:
    own = checkpointer(tmp_path)
    save_without_barriers(own, lambda step: step % 4 == 3)
    for step in range(9):
        own.on_step(tree=None, step=step)
    assert asked == [3, 7]
    own.on_step(tree=None, step=9, force=True)  # the last step's save
    assert asked == [3, 7, 9]


def test_saves_by_the_step_count_need_no_question(
    asked: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Checkpointer, "_get_current_step_save_interval", lambda self, step: 5)
    own = checkpointer(tmp_path)
    save_without_barriers(own, lambda step: False)
    for step in range(1, 12):
        own.on_step(tree=None, step=step)
    assert asked == [5, 10]


def test_what_is_prepared_is_saved_at_the_path_that_it_was_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved: list[tuple[Any, str, str | None]] = []

    def save(self: Checkpointer, tree: Any, *, destination: str, base_path_override: str | None = None) -> None:
        saved.append((tree, destination, base_path_override))

    monkeypatch.setattr(Checkpointer, "save_checkpoint", save)
    own: Any = checkpointer(tmp_path)
    save_along(own, lambda tree, path: (tree, path))
    own.save_checkpoint(tree="state", destination="step-3")
    own.save_checkpoint(tree="state", destination="step-4", base_path_override="/temporary")
    assert saved == [
        (("state", f"{tmp_path}/step-3"), "step-3", None),
        (("state", "/temporary/step-4"), "step-4", "/temporary"),
    ]
