"""Dispatch of the command line, and its reports where their reader has gone."""

import sys

import pytest

from helpers.closed_pipe import run_without_reader
from levanter_diloco import cli
from levanter_diloco.cli import PROGRAMS, TOOLS, USAGE, main

PLAN = ["plan", "--params", "10e9", "--layers", "48", "--step_seconds", "0.8", "--rate", "10gbit"]


@pytest.mark.parametrize("args", [[], ["-h"], ["--help"]])
def test_usage_names_every_command(args: list[str], capsys: pytest.CaptureFixture[str]):
    main(args)
    printed = capsys.readouterr().out
    assert printed == USAGE + "\n"
    assert all(name in printed for name in (*PROGRAMS, *TOOLS))


def test_unknown_command_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit:
        main(["trian_lm"])
    assert exit.value.code == 2
    commands = "train_lm, plan, bench, compile, export, inspect"
    assert capsys.readouterr().err == f"levanter-diloco: unknown command 'trian_lm'; the commands are {commands}\n"


@pytest.mark.parametrize("tool", TOOLS)
def test_help_of_a_tool_names_it_and_lists_its_options(tool: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit:
        main([tool, "--help"])
    assert exit.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: levanter-diloco {tool} ")
    assert "--help" in printed


def test_arguments_come_from_the_command_line_where_none_are_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["levanter-diloco", "--help"])
    cli.main()
    assert capsys.readouterr().out == USAGE + "\n"


@pytest.mark.parametrize("args", [["--help"], ["plan", "--help"], PLAN, [*PLAN, "--json"]], ids=" ".join)
def test_reader_that_has_gone_is_no_error(args: list[str]):
    assert run_without_reader(args) == (0, "")
