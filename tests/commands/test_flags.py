"""Flags of our own tools: what is wrong with them is one line and status 2."""

import argparse

import pytest

from levanter_diloco.commands.flags import Parser, count


def test_count_is_a_whole_number_of_at_least_one() -> None:
    assert [count(text) for text in ("1", "20")] == [1, 20]
    for text in ("0", "-1", "1.5", "two", "", "1e3"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"must be a whole number of at least 1; 2 works\."):
            count(text)


def test_bad_flag_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="levanter-diloco tool")
    parser.add_argument("--number", type=count)
    with pytest.raises(SystemExit) as exit:
        parser.parse_args(["--number", "0"])
    assert exit.value.code == 2
    assert capsys.readouterr().err == (
        "levanter-diloco: argument --number: (0) must be a whole number of at least 1; 2 works.\n"
    )
