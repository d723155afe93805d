"""Kinds of options: those that a registered outer optimizer may have, beyond ours."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from helpers.refusals import read_or_refuse
from levanter_diloco.options.config import DiLoCoConfig
from levanter_diloco.options.kinds import check_kinds
from levanter_diloco.options.outer import OuterOptimizerConfig


@OuterOptimizerConfig.register_subclass("many_kinds")
@dataclass(frozen=True)
class ManyKinds(OuterOptimizerConfig):
    betas: tuple[float, ...] = (0.9,)
    pair: tuple[int, float] = (1, 0.5)
    table: Path = Path("table.json")
    order: Literal[1, 2] = 1
    extra: Any = None

    def build(self, outer_steps: int) -> Any:
        raise NotImplementedError


@dataclass
class Trainer:
    diloco: DiLoCoConfig = field(default_factory=DiLoCoConfig)


@dataclass
class RunConfig:
    trainer: Trainer = field(default_factory=Trainer)


def outer(text: str, folder: Path) -> Any:
    path = folder / "run.yaml"
    path.write_text(f"trainer: {{diloco: {{outer: {{type: many_kinds, {text}}}}}}}")
    return read_or_refuse(RunConfig, ["--config_path", str(path)]).trainer.diloco.outer


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("betas: [0.5, 0.25]", {"betas": (0.5, 0.25)}),
        ("pair: [2, 0.5]", {"pair": (2, 0.5)}),
        ("table: other.json", {"table": Path("other.json")}),
        ("order: 2", {"order": 2}),
        ("extra: 3", {"extra": 3}),
        ("extra: [a]", {"extra": ["a"]}),
        ("extra: null", {"extra": None}),
    ],
)
def test_kind_beyond_ours_is_read(text: str, changes: dict[str, Any], tmp_path: Path):
    assert outer(text, tmp_path) == ManyKinds(**changes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("betas: 3", "outer.betas (3) must be a list"),
        ("betas: [true]", "outer.betas[0] (true) must be a finite number"),
        ("pair: [1, null]", "outer.pair[1] (null) must be a finite number"),
        ("pair: [1]", "outer.pair"),
        ("table: [a]", "outer.table (['a']) must be a path"),
        ("order: 3", "outer.order (3) must be one of 1, 2"),
        ("order: true", "outer.order (true) must be one of 1, 2"),
        ("order: first", "outer.order"),
    ],
)
def test_wrong_value_of_a_kind_beyond_ours_is_one_line(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as exit:
        outer(text, tmp_path)
    said = capsys.readouterr().err
    assert exit.value.code == 2 and said.count("\n") == 1
    assert words in said and "Traceback" not in said


def test_kind_that_is_not_known_is_left_to_the_reader():
    check_kinds(complex, "1j", "trainer.diloco.outer.extra")
    check_kinds(set[int], [1], "trainer.diloco.outer.extra")
