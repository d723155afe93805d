"""The table of options: the README's is what the command prints, and it leaves no option out."""

import dataclasses
import subprocess
import sys

import pytest

from helpers.paths import ROOT
from levanter_diloco.network.link import LinkConfig
from levanter_diloco.options.config import DiLoCoConfig
from levanter_diloco.options.outer import AdamConfig, AverageConfig
from levanter_diloco.options.table import BEGIN, END, field_texts, replaced, table

README = ROOT / "levanter_diloco" / "options" / "README.md"


def test_readme_has_the_table_that_the_command_prints():
    text = README.read_text()
    assert replaced(text) == text, "python -m levanter_diloco.options.table --write levanter_diloco/options/README.md"
    done = subprocess.run(
        [sys.executable, "-m", "levanter_diloco.options.table"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == text.partition(BEGIN)[2].partition(END)[0].strip()


@pytest.mark.parametrize("config", [DiLoCoConfig, AdamConfig, AverageConfig, LinkConfig])
def test_every_option_has_a_text_and_a_row(config: type):
    rows = {line.split("`")[1] for line in table().splitlines() if line.startswith("| `")}
    for option in dataclasses.fields(config):
        assert field_texts(config)[option.name] and option.name in rows


def test_default_that_differs_names_its_optimizer():
    [row] = [line for line in table().splitlines() if line.startswith("| `learning_rate`")]
    assert row.startswith("| `learning_rate` | 0.7 (average: 1.0, adam: 0.3) | ")


def test_table_is_put_between_the_markers_alone():
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert replaced(text) == f"before\n{BEGIN}\n{table()}\n{END}\nafter\n"
    with pytest.raises(ValueError, match="must have the lines <!-- options -->"):
        replaced("no markers")
