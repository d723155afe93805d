"""Refusals of the command: one line and exit status 2, before anything is read or built."""

from typing import Any

import pytest

from levanter_diloco import cli
from levanter_diloco.console import refuse
from levanter_diloco.errors import OptionError
from levanter_diloco.options.reading import read

NO_TEXT = {"data__components__topics__source__train_urls": ["/nowhere/train.jsonl"], "data__cache_dir": "/nowhere"}

VANILLA = {"sync_period": 6, "ici_islands": 2}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs the command in this process (of eight devices), which must refuse it; returns the one line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        cli.main(["train_lm", *arguments])
    printed = capsys.readouterr()
    said = printed.err + ("" if isinstance(exit.value.code, int) else str(exit.value.code))
    assert exit.value.code == 2, said
    assert printed.out == ""
    [line] = said.strip().splitlines()
    assert line.startswith("levanter-diloco: ")
    return line


def read_or_refuse(config_class: type, args: list[str]) -> Any:  # Any: an instance of `config_class`
    """Reads options as the command does: exits with 2 and one line where they do not fit `config_class`."""
    try:
        return read(config_class, args)
    except OptionError as error:
        refuse(str(error))


def assert_says(line: str, *parts: str) -> None:
    for part in parts:
        assert part in line, f"{part!r} is not in {line!r}"
