"""The label beside a checkpoint."""

import json
from dataclasses import dataclass
from pathlib import Path

import optax
import pytest

from levanter_diloco.checkpoint.label import LABEL, Label
from levanter_diloco.options.config import DiLoCoConfig
from levanter_diloco.options.outer import OuterOptimizerConfig


@dataclass(frozen=True)
class Unregistered(OuterOptimizerConfig):
    """An outer optimizer that no YAML can name."""

    decay: float = 0.5

    def build(self, outer_steps: int) -> optax.GradientTransformation:
        return optax.sgd(self.learning_rate)


def test_label_comes_back_as_it_was_written(tmp_path: Path) -> None:
    label = Label.of(4, DiLoCoConfig(sync_period=6, num_fragments=3, wire="int4"), model=None)
    label.write(str(tmp_path / "step-3"))
    read = Label.read(str(tmp_path / "step-3"))
    assert read is not None and (read.islands, read.model, read.vocab_size) == (4, None, None)
    assert (read.diloco["wire"], read.diloco["sync_period"], read.diloco["guard"]) == ("int4", 6, True)
    assert read.diloco["outer"]["type"] == "nesterov"


def test_optimizer_without_a_name_goes_by_its_class(tmp_path: Path) -> None:
    Label.of(2, DiLoCoConfig(outer=Unregistered()), model=None).write(str(tmp_path))
    read = Label.read(str(tmp_path))
    assert read is not None
    assert (read.diloco["outer"]["type"], read.diloco["outer"]["decay"]) == ("Unregistered", 0.5)


def test_checkpoint_without_a_label_has_none(tmp_path: Path) -> None:
    assert Label.read(str(tmp_path)) is None


@pytest.mark.parametrize("text", ["", "{", json.dumps({"islands": 2}), json.dumps([1])])
def test_damaged_label_is_said(text: str, tmp_path: Path) -> None:
    (tmp_path / LABEL).write_text(text)
    with pytest.raises(ValueError, match=r"diloco\.json is not as it was written"):
        Label.read(str(tmp_path))
