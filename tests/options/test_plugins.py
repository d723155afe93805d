"""Plugins: ours, and one of somebody else that adds an outer optimizer."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from helpers.command_runs import COMMAND, Workplace, checkpoint, metrics

LION = """
from dataclasses import dataclass

import optax

from levanter_diloco.options.outer import OuterOptimizerConfig


@OuterOptimizerConfig.register_subclass("lion")
@dataclass(frozen=True)
class LionConfig(OuterOptimizerConfig):
    learning_rate: float = 0.01
    beta: float = 0.9

    def build(self, outer_steps):
        return optax.lion(self.schedule(outer_steps), b1=self.beta)


def register():
    print("registered lion")
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder that on PYTHONPATH is as good as an installed package with an entry point."""
    (tmp_path / "outer_lion.py").write_text(LION)
    info = tmp_path / "outer_lion-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outer-lion\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[levanter.plugins]\nlion = outer_lion:register\n")
    return tmp_path


def load_plugins(folder: Path) -> subprocess.CompletedProcess[str]:
    program = "from levanter_diloco.cli import main; main(['train_lm', '--config_path', '/nowhere'])"
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_module_as_a_plugin_registers_by_being_imported(installed: Path) -> None:
    entries = installed / "outer_lion-1.0.dist-info" / "entry_points.txt"
    entries.write_text("[levanter.plugins]\nlion = outer_lion\n")
    (installed / "outer_lion.py").write_text("print('imported')")
    assert load_plugins(installed).stdout == "imported\n"


def test_plugin_that_does_not_load_is_named(installed: Path) -> None:
    entries = installed / "outer_lion-1.0.dist-info" / "entry_points.txt"
    entries.write_text("[levanter.plugins]\nlion = outer_lynx:register\n")
    done = load_plugins(installed)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "levanter-diloco: the plugin lion = outer_lynx:register of the package outer-lion does not load: "
        "No module named 'outer_lynx'"
    ]


def test_package_is_a_plugin() -> None:
    [plugin] = [plugin for plugin in entry_points(group="levanter.plugins") if plugin.name == "diloco"]
    assert plugin.value == "levanter_diloco.plugin:register"
    plugin.load()()


def test_plugin_registers_what_yaml_can_name() -> None:
    # in a process of its own: here other tests may have imported everything
    program = (
        "from importlib.metadata import entry_points\n"
        "[plugin] = [p for p in entry_points(group='levanter.plugins') if p.name == 'diloco']\n"
        "plugin.load()()\n"
        "from levanter_diloco.options.outer import OuterOptimizerConfig\n"
        "from levanter.tracker import TrackerConfig\n"
        "print(*OuterOptimizerConfig.get_known_choices(), *TrackerConfig.get_known_choices())\n"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert {"nesterov", "sgd", "adam", "average", "json_lines"} <= set(printed.split())


@pytest.mark.entry
@pytest.mark.slow
def test_outer_optimizer_of_another_package_trains(workplace: Workplace, installed: Path) -> None:
    config = workplace.config(
        "lion",
        {"sync_period": 2, "ici_islands": 2, "outer": {"type": "lion", "learning_rate": 0.02}},
        trainer__num_train_steps=2,
        trainer__steps_per_eval=2,
    )
    done = workplace.run(COMMAND, config, PYTHONPATH=str(installed)).succeeded()
    assert done.stdout.startswith("registered lion\n")
    assert (checkpoint(done.folder, 1) / "metadata.json").is_file()
    # a lion moves every element that has a gradient by the rate: |update| <= 0.02 * sqrt(n)
    line = metrics(done.folder)[1]
    assert 0 < line["diloco/outer_update_norm"] <= 0.02 * 102_688**0.5 * (1 + 1e-5)
