"""Each startup error as a user meets it: one line with the option, its value and a value that works, and exit code 2.

The YAML names text that does not exist, so an error that comes after the data or the model would be another one.
"""

import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from helpers.command_runs import COMMAND, STREAMING, Workplace
from helpers.paths import DATA
from helpers.refusals import NO_TEXT, VANILLA, assert_says, refusal
from levanter_diloco import cli

pytestmark = pytest.mark.entry


def test_islands_are_not_left_behind_without_a_word(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    config = workplace.config("left", {"enabled": False}, **NO_TEXT)
    folder = config.parent / "checkpoints" / "left"
    folder.mkdir(parents=True)
    with tarfile.open(DATA / "checkpoints_0.1.0.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    line = refusal(capsys, "--config_path", str(config))
    assert_says(line, "trainer.diloco.enabled (false)", "step-7", "trainer.id", "levanter-diloco export")


@pytest.mark.parametrize(
    ("diloco", "option", "value", "works"),
    [
        ({"sync_period": 0}, "sync_period", "0", "100"),
        ({"sync_period": -5}, "sync_period", "-5", "100"),
        ({"num_fragments": 0}, "num_fragments", "0", "1"),
        ({"mixing_alpha": 2}, "mixing_alpha", "2", "0.5"),
        ({"mixing_alpha": -0.5}, "mixing_alpha", "-0.5", "0.5"),
        ({"overlap_steps": 6}, "overlap_steps", "6", "5"),
        ({"overlap_steps": -1}, "overlap_steps", "-1", "5"),
        ({**STREAMING, "sync_period": 7, "overlap_steps": 6}, "overlap_steps", "6", "5"),
        ({"islands_per_slot": 0}, "islands_per_slot", "0", "2"),
        ({"ici_islands": 0}, "ici_islands", "0", "2"),
        ({"dcn_islands": -2}, "dcn_islands", "-2", "2"),
        ({"outer": {"learning_rate": -1}}, "outer.learning_rate", "-1", "0.7"),
        ({"outer": {"momentum": 1}}, "outer.momentum", "1", "0.9"),
        ({"outer": {"type": "sgd", "momentum": -0.1}}, "outer.momentum", "-0.1", "0.9"),
        ({"outer": {"warmup": -1}}, "outer.warmup", "-1", "0"),
        ({"outer": {"min_lr_ratio": 1.5}}, "outer.min_lr_ratio", "1.5", "0.1"),
    ],
)
def test_value_out_of_range_is_refused(
    diloco: dict[str, Any],
    option: str,
    value: str,
    works: str,
    workplace: Workplace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = workplace.config("refused", {**VANILLA, **diloco}, **NO_TEXT)
    line = refusal(capsys, "--config_path", str(config))
    assert_says(line, f"trainer.diloco.{option}", f"({value}", f"; {works} works")


@pytest.mark.parametrize(
    ("diloco", "changes", "parts"),
    [
        # K and the devices: eight here, or six of the data axis
        ({"ici_islands": 3}, {}, ["trainer.diloco.ici_islands", "(3)", "divide the 8 devices", "works"]),
        ({"dcn_islands": 2}, {}, ["trainer.diloco.dcn_islands", "(2)", "divide the 1 slices", "works"]),
        ({"ici_islands": -1}, {}, ["trainer.diloco.ici_islands", "(-1)", "data", "ici_islands: 2"]),
        (
            {"ici_islands": -1},
            {"trainer__mesh__axes": {"data": 3}},
            ["trainer.diloco.ici_islands", "(-1)", "does not divide 8", "works"],
        ),
        (
            {"ici_islands": 2},
            {"trainer__mesh__axes": {"data": -1, "diloco": 4}},
            ["trainer.diloco.ici_islands", "(2)", "trainer.mesh.axes.diloco (4)", "leaving one of the two out works"],
        ),
        # K and the data
        (
            {"island_data": [{"topics": 1.0}]},
            {},
            ["trainer.diloco.island_data", "(1 mixtures)", "2 islands", "a list of 2 works"],
        ),
        (
            {"island_data": [{"topics": 1.0}, {"topcis": 1.0}]},
            {},
            ["trainer.diloco.island_data", "(topcis)", "data.components", "topics works"],
        ),
        # B and K
        ({}, {"trainer__train_batch_size": 7}, ["trainer.train_batch_size", "(7)", "2 islands", "8 works"]),
        (
            {},
            {"trainer__train_batch_size": 8, "trainer__per_device_parallelism": 3},
            ["trainer.train_batch_size", "(8)", "trainer.per_device_parallelism", "24 works"],
        ),
        # the model and P
        ({"num_fragments": 4}, {}, ["trainer.diloco.num_fragments", "(4)", "4 layers", "1, 2, 3, 5 work"]),
        (
            {"num_fragments": 3},
            {"model__scan_layers": False},
            ["trainer.diloco.num_fragments", "(3)", "1 works", "model.scan_layers: true"],
        ),
        (
            {"num_fragments": 3},
            {"adapter": {"type": "lora", "r": 4}},
            ["trainer.diloco.num_fragments", "(3)", "fragment 0 empty", "1 works"],
        ),
        # what the host can do and islands cannot
        (
            {},
            {"trainer__model_averaging": {"type": "ema"}},
            ["trainer.model_averaging", "trainer.diloco", "leave it out"],
        ),
        ({}, {"trainer__quantization": {}}, ["trainer.quantization", "trainer.diloco", "leave it out"]),
        (
            {},
            {"trainer__use_explicit_mesh_axes": True},
            ["trainer.use_explicit_mesh_axes", "(True)", "trainer.diloco", "leave it out"],
        ),
        ({}, {"trainer__mesh__batch_axis_name": None}, ["trainer.mesh.batch_axis_name", "batch works"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_options_that_do_not_fit_each_other_are_refused(
    diloco: dict[str, Any],
    changes: dict[str, Any],
    parts: list[str],
    workplace: Workplace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = workplace.config("refused", {**VANILLA, **diloco}, **{**NO_TEXT, **changes})
    assert_says(refusal(capsys, "--config_path", str(config)), *parts)


@pytest.mark.parametrize(
    ("changes", "path", "known"),
    [
        ({"trainer__diloco__sync_perod": 10}, "trainer.diloco", ["sync_perod", "sync_period", "num_fragments"]),
        ({"trainer__diloco__outer": {"momentun": 0.9}}, "trainer.diloco.outer", ["momentun", "momentum", "nesterov"]),
        ({"trainer__diloco__outer": {"type": "lion"}}, "trainer.diloco.outer", ["lion", "nesterov", "sgd", "average"]),
        ({"trainer__diloco__layer_order": "random"}, "trainer.diloco.layer_order", ["random", "interleaved"]),
        ({"trainer__diloco__sync_period": "often"}, "trainer.diloco.sync_period", ["often", "int"]),
        ({"trainer__diloco": 3}, "trainer.diloco", ["3", "block"]),
        ({"trainer__train_bach_size": 8}, "trainer", ["train_bach_size", "train_batch_size", "num_train_steps"]),
        ({"trainer__checkpointer__base_pat": "x"}, "trainer.checkpointer", ["base_pat", "base_path", "keep"]),
        ({"model__hiden_dim": 8}, "model", ["hiden_dim", "hidden_dim", "num_layers"]),
        ({"optimizr": {"type": "adam"}}, "", ["optimizr", "optimizer", "trainer", "model"]),
    ],
)
def test_typing_error_in_the_yaml_lists_what_is_known(
    changes: dict[str, Any], path: str, known: list[str], workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    config = workplace.config("refused", VANILLA, **NO_TEXT, **changes)
    assert_says(refusal(capsys, "--config_path", str(config)), path, *known)


@pytest.mark.parametrize(
    ("flag", "parts"),
    [
        (["--trainer.diloco.sync_perod", "10"], ["--trainer.diloco.sync_perod", "--trainer.diloco.sync_period"]),
        (["--trainer.num_trian_steps", "10"], ["--trainer.num_trian_steps", "--trainer.num_train_steps"]),
        (["--trainer.diloco.sync_period", "0"], ["trainer.diloco.sync_period", "(0)", "100 works"]),
        (["--trainer.diloco.sync_period", "often"], ["trainer.diloco.sync_period", "often"]),
        (["--trainer.diloco.outer.learning_rate", "-1"], ["trainer.diloco.outer.learning_rate", "(-1", "0.7 works"]),
        (["--trainer.diloco.sync_period"], ["--trainer.diloco.sync_period", "expected"]),
    ],
)
def test_bad_flag_is_refused(
    flag: list[str], parts: list[str], workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    config = workplace.config("refused", VANILLA, **NO_TEXT)
    assert_says(refusal(capsys, "--config_path", str(config), *flag), *parts)


def test_missing_yaml_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert_says(refusal(capsys, "--config_path", "/nowhere/run.yaml"), "/nowhere/run.yaml")


def test_text_that_is_no_yaml_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("trainer: {diloco: [}\n")
    assert_says(refusal(capsys, "--config_path", str(broken)), "broken.yaml", "line 1")


def test_unknown_command_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["train_ml"])
    assert exit.value.code == 2
    assert "train_ml" in (said := capsys.readouterr().err) and "train_lm" in said


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--help"])
    assert "train_lm" in capsys.readouterr().out


@pytest.mark.slow
def test_command_prints_nothing_but_the_one_line(workplace: Workplace) -> None:
    config = workplace.config("refused", {**VANILLA, "ici_islands": 3}, **NO_TEXT)
    done: subprocess.CompletedProcess | Any = workplace.run(COMMAND, config)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "levanter-diloco: trainer.diloco.ici_islands (3) must divide the 4 devices of a slice; 1 with "
        "trainer.diloco.islands_per_slot: 3 (islands that share devices) works.\n"
    )
