"""`levanter-diloco plan`: the command as used."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.paths import ROOT
from levanter_diloco import cli
from levanter_diloco.algorithm.codecs import Bf16
from levanter_diloco.algorithm.wire import register_wire, wire_names
from levanter_diloco.commands.plan.command import EXAMPLES, parse_rate

TINY = {"hidden_dim": 64, "intermediate_dim": 96, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2}

TEN_BILLION = ["plan", "--params", "10e9", "--layers", "48", "--step_seconds", "0.8"]


def test_registered_wire_is_planned(capsys: pytest.CaptureFixture[str]):
    from levanter_diloco.algorithm.wire import _FORMATS

    register_wire("half")(Bf16)
    try:
        plan = json.loads(output(capsys, *TEN_BILLION, "--json"))
        rows = {row["wire"]: row["largest_transfer_bytes"] for row in plan["methods"][3:]}
        assert rows["half"] == rows["bf16"]
    finally:
        del _FORMATS["half"]


def test_balanced_fragments_are_equal_and_any_number(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = config(tmp_path, num_fragments=3, partition="balanced")
    plan = json.loads(
        output(capsys, "plan", "--config_path", str(path), "--step_seconds", "1", "--islands", "2", "--json")
    )
    total = plan["parameters"]["total"]
    assert plan["fragment_bytes"] == pytest.approx([total * 4 / 3] * 3)
    captured = plan["memory_added_per_island"]["captured_with_overlap"]
    assert captured == pytest.approx(total * 4 / 3)
    said = output(capsys, *TEN_BILLION, "--num_fragments", "7", "--partition", "balanced")
    assert "0-6: equal shares of everything" in said
    assert "must be one of layers, balanced" in refusal(capsys, *TEN_BILLION[1:], "--partition", "rows")


def output(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    cli.main(list(args))
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        cli.main(["plan", *args])
    said = capsys.readouterr()
    assert exit.value.code == 2 and said.out == ""
    [line] = said.err.splitlines()
    assert line.startswith("levanter-diloco: ")
    return line


def test_plan_of_a_parameter_count(capsys: pytest.CaptureFixture[str]):
    said = output(capsys, *TEN_BILLION, "--rate", "10gbit")
    for part in ("valid P: 1 2 3 4 5 7 9 13 17 25 49", "recommended", "[Streaming]", "Assumed", "e3m0"):
        assert part in said
    assert "Islands: 2" in said and "--rest_params" in said


def test_readme_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]):
    section = (ROOT / "levanter_diloco/commands/plan/README.md").read_text()
    command, _, printed = section.partition("```text\n$ levanter-diloco ")[2].partition("```")[0].partition("\n")
    assert output(capsys, *command.split()) == printed


def test_json_has_every_figure(capsys: pytest.CaptureFixture[str]):
    plan = json.loads(output(capsys, *TEN_BILLION, "--rate", "10gbit", "--islands", "4", "--json"))
    assert plan["islands"] == 4 and plan["rate"] == 10e9
    assert len(plan["methods"]) == 3 + len(wire_names())
    assert set(plan["methods"][0]["required_rate"]) == {"50%", "80%", "90%", "95%", "99%"}


def config(tmp_path: Path, **diloco: Any) -> Path:
    path = tmp_path / "run.yaml"
    trainer = {"mp": "p=bf16,c=bf16", "diloco": {"sync_period": 30, "ici_islands": 2, "dcn_islands": 2, **diloco}}
    path.write_text(
        yaml.safe_dump({"model": {"type": "llama", **TINY}} | {"trainer": trainer, "data": {"tokenizer": "gpt2"}})
    )
    return path


def test_plan_of_a_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = config(tmp_path, num_fragments=3, overlap_steps=2, islands_per_slot=2, link={"rate": "50mbit"})
    plan = json.loads(output(capsys, "plan", "--config_path", str(path), "--step_seconds", "0.1", "--json"))
    assert plan["islands"] == 8 and plan["rate"] == 50e6
    assert plan["schedule"]["effective_period"] == 30 and plan["schedule"]["overlap_steps"] == 2
    assert plan["methods"][0]["wire"] == "16 bit"  # the parameters' dtype
    flags = ("--sync_period", "60", "--num_fragments", "1", "--islands", "2", "--rate", "1gbit", "--vocab_size", "7")
    plan = json.loads(output(capsys, "plan", "--config_path", str(path), "--step_seconds", "0.1", *flags, "--json"))
    assert plan["islands"] == 2 and plan["rate"] == 1e9 and plan["schedule"]["sync_period"] == 60
    assert plan["parameters"]["rest"] == 7 * 64 * 2 + 64


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_can_be_planned(path: Path, capsys: pytest.CaptureFixture[str]):
    flags = ("--step_seconds", "0.3", "--islands", "2", "--vocab_size", "1024")
    assert "valid P" in output(capsys, "plan", "--config_path", str(path), *flags)


def test_one_island_needs_no_link(capsys: pytest.CaptureFixture[str]):
    said = output(capsys, *TEN_BILLION, "--islands", "1", "--rate", "1mbit")
    assert "one island exchanges nothing" in said and "100.0%" in said


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ([], ["--config_path", "--params 10e9 --layers 48 --step_seconds 0.8 works"]),
        (["--params", "1e9"], ["--layers is missing", "--params"]),
        (["--layers", "4"], ["--params is missing", "--layers"]),
        (["--params", "1e9", "--layers", "4"], ["--step_seconds is missing", "0.8 works"]),
        (["--params", "ten"], ["--params (ten)", "number", "10e9 works"]),
        (["--params", "0"], ["--params (0)", "at least 1", "10e9 works"]),
        (["--params", "inf"], ["--params (inf)", "10e9 works"]),
        (["--layers", "4.5"], ["--layers (4.5)", "whole number", "48 works"]),
        (["--step_seconds", "0"], ["--step_seconds (0)", "above 0", "0.8 works"]),
        (["--step_seconds", "-1"], ["--step_seconds (-1)", "above 0", "0.8 works"]),
        (["--islands", "0"], ["--islands (0)", "at least 1", "2 works"]),
        (["--rate", "fast"], ["--rate (fast)", "gbit", "1gbit works"]),
        (["--rate", "1e400"], ["--rate (1e400)", "1gbit works"]),
        (["--rate", "0"], ["--rate (0)", "above 0", "1gbit works"]),
        (["--vocab_size", "0"], ["--vocab_size (0)", "at least 1"]),
        (["--sync_period", "0"], ["--sync_period (0)", "at least 1", "100 works"]),
        ([*TEN_BILLION[1:], "--num_fragments", "6"], ["--num_fragments (6)", "divisor of the 48 layers", "5, 7, 9"]),
        ([*TEN_BILLION[1:], "--overlap_steps", "100"], ["--overlap_steps (100)", "100 steps", "99 works"]),
        ([*TEN_BILLION[1:], "--rest_params", "1e10"], ["--rest_params (1e+10)", "--params", "1e+09 works"]),
        (["--config_path", "/nowhere/run.yaml"], ["--config_path (/nowhere/run.yaml)", "No such file"]),
        (["--islands"], ["--islands ()", "--islands 2 works"]),
        (["--isl", "2"], ["--isl 2", "--islands"]),
        (["--wire", "f32"], ["--wire f32", "--num_fragments"]),
    ],
    ids=" ".join,
)
def test_bad_flag_is_refused_in_one_line(flags: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]):
    line = refusal(capsys, *flags)
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("diloco", "parts"),
    [
        ({"num_fragments": 4}, ["trainer.diloco.num_fragments (4)", "4 layers", "1, 2, 3, 5 work"]),
        ({"sync_period": 0}, ["trainer.diloco.sync_period (0)", "at least 1", "100 works"]),
        ({"overlap_steps": 30}, ["trainer.diloco.overlap_steps (30)", "29 works"]),
        ({"dcn_islands": -1}, ["trainer.diloco.dcn_islands (-1)", "slices", "--islands"]),
        ({"ici_islands": -1}, ["trainer.diloco.ici_islands (-1)", "devices", "--islands"]),
        ({"link": {"rate": "fast"}}, ["trainer.diloco.link.rate (fast)", "50mbit works"]),
        ({"link": 5}, ["trainer.diloco.link must be a block of options", "found 5"]),
    ],
    ids=str,
)
def test_bad_option_of_the_yaml_is_refused_in_one_line(
    diloco: dict[str, Any], parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    line = refusal(capsys, "--config_path", str(config(tmp_path, **diloco)), "--step_seconds", "0.1")
    for part in parts:
        assert part in line


def test_text_that_is_no_yaml_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    broken = tmp_path / "broken.yaml"
    for text in ("trainer: {diloco: [}\n", "just words", "- 1"):
        broken.write_text(text)
        assert "--config_path" in refusal(capsys, "--config_path", str(broken), "--step_seconds", "0.1")


def test_value_that_works_works():
    assert parse_rate("--rate", EXAMPLES["--rate"]) == 1e9
    assert [parse_rate("--rate", text) for text in ("50Mbit", "2.5 gbit", "1e9", "8kbit")] == [50e6, 2.5e9, 1e9, 8e3]


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit:
        cli.main(["plan", "--help"])
    assert exit.value.code == 0
    said = capsys.readouterr().out
    assert all(flag in said for flag in EXAMPLES)


def test_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "levanter-diloco[plot]" in refusal(capsys, *TEN_BILLION[1:], "--plot", "out.png")


def test_plot_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    output(capsys, *TEN_BILLION, "--rate", "10gbit", "--plot", str(tmp_path / "out.png"))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    for name in ("nowhere/out.png", "out.words"):
        assert f"--plot ({tmp_path / name})" in refusal(capsys, *TEN_BILLION[1:], "--plot", str(tmp_path / name))
    assert "--islands 2" in refusal(capsys, *TEN_BILLION[1:], "--islands", "1", "--plot", str(tmp_path / "out.png"))
