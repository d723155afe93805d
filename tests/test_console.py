"""The end of a command: what it prints, refuses, and how its process goes."""

import subprocess
import sys

import pytest

from levanter_diloco.console import LONGEST_LINE, refuse

# Runs as a user's shell does: an exit handler of the interpreter's teardown, after all of ours, tells of one.
ENDING = """
import sys, threading, time
from levanter_diloco.console import end, refuse

class TellsOfTeardown:
    def __del__(self): sys.__stderr__.write("torn down\\n")

kept = TellsOfTeardown()

def run():
    {body}

end(run)
"""


def ending(body: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Ends a process of its own after `body`, the lines of a function."""
    code = ENDING.format(body=body.replace("\n", "\n    "))
    return subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=60)


def test_probe_tells_of_a_teardown():
    # The tests below would pass on a probe that never speaks.
    done = subprocess.run(
        [sys.executable, "-c", ENDING.format(body="pass").replace("end(run)", "run()")], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "torn down\n")


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("print('done')", 0, ""),
        ("refuse('a bad option')", 2, "levanter-diloco: a bad option\n"),
        ("refuse('a lost run', code=1)", 1, "levanter-diloco: a lost run\n"),
        ("sys.exit(3)", 3, ""),
        (
            "raise KeyboardInterrupt",
            130,
            "levanter-diloco: interrupted; the same command goes on from the last checkpoint\n",
        ),
    ],
)
def test_end_gives_the_status_without_a_teardown(body: str, status: int, said: str):
    done = ending(body)
    assert (done.returncode, done.stderr) == (status, said)
    assert done.stdout == ("done\n" if body.startswith("print") else "")


def test_end_does_not_wait_for_a_thread_of_the_host():
    # Such a thread fetches batches for ever; a teardown would wait for it, or die under it.
    done = ending("threading.Thread(target=time.sleep, args=(300,)).start()\nrefuse('a lost run', code=1)")
    assert (done.returncode, done.stderr) == (1, "levanter-diloco: a lost run\n")


def test_end_runs_what_was_registered_for_the_exit():
    # Trackers and jax.distributed register what they have to finish there.
    done = ending("import atexit\natexit.register(print, 'finished')")
    assert (done.returncode, done.stdout) == (0, "finished\n")


def test_end_leaves_a_fault_to_its_traceback():
    done = ending("raise ZeroDivisionError('a fault')")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and "ZeroDivisionError: a fault" in done.stderr


def test_end_says_a_sentence_that_is_the_status():
    done = ending("sys.exit('argparse says so')")
    assert done.returncode == 1
    assert done.stderr.startswith("argparse says so\n")


def test_broken_pipe_of_something_else_is_no_end_of_the_reader():
    # A tracker's socket, say: swallowed, the run would end with 0 and train no further.
    done = ending("raise BrokenPipeError(32, 'of a socket')")
    assert done.returncode == 1
    assert "BrokenPipeError: [Errno 32] of a socket" in done.stderr


def test_refusal_is_one_line_that_a_terminal_can_show(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit:
        refuse("a value of\n two lines, \x1b[31mred")
    assert exit.value.code == 2
    assert capsys.readouterr().err == "levanter-diloco: a value of two lines, \\x1b[31mred\n"


def test_long_refusal_keeps_both_of_its_ends(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        refuse("begins " + "x" * 2 * LONGEST_LINE + " ends")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("levanter-diloco: begins xx") and line.endswith("xx ends")
    assert len(line) < LONGEST_LINE + 50
