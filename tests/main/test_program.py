"""Programs of the host, run on options: how each error of ours ends the process."""

import sys
from pathlib import Path

import pytest

from helpers.command_runs import Workplace
from levanter_diloco.errors import ModelError, OptionError, RunError
from levanter_diloco.main.program import run

PLUGIN = """
from levanter_diloco.errors import ModelError, OptionError, RunError

def fail():
    raise {error}("the sentence of the error")
"""


# `python -m levanter_diloco.main.train_lm`, with an object that the interpreter's teardown, if any, makes speak.
MODULE = """
import runpy, sys

class TellsOfTeardown:
    def __del__(self): sys.__stderr__.write("torn down\\n")

kept = TellsOfTeardown()
runpy.run_module("levanter_diloco.main.train_lm", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(("error", "status"), [(OptionError, 2), (ModelError, 2), (RunError, 1)])
def test_error_is_one_line_and_a_status(
    error: type[Exception],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    # An installed plugin is the first thing that a program meets.
    (tmp_path / "failing_plugin.py").write_text(PLUGIN.format(error=error.__name__))
    about = tmp_path / "failing_plugin-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: failing_plugin\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[levanter.plugins]\nfailing = failing_plugin:fail\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as exit:
        run("levanter_diloco.main.train_lm", [])
    sys.modules.pop("failing_plugin", None)
    assert exit.value.code == status
    assert capsys.readouterr().err == "levanter-diloco: the sentence of the error\n"


@pytest.mark.slow
@pytest.mark.entry
def test_module_ends_a_lost_run_without_a_teardown(workplace: Workplace):
    # The host's loader threads are at work by then: a teardown would wait for them, or die under them.
    lost = {"sync_period": 2, "ici_islands": 2}
    config = workplace.config("lost", lost, optimizer__learning_rate=1e30, trainer__steps_per_eval=1000)
    done = workplace.run((sys.executable, "-c", MODULE), config)
    assert done.returncode == 1, done.stderr[-3000:]
    line = done.stderr.splitlines()[-1]
    assert line.startswith("levanter-diloco: no island has finite numbers left after step ")
    assert "Fatal Python error" not in done.stderr and "Traceback" not in done.stderr
