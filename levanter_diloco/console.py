"""Standard streams and exit status of a command: its report, its refusal in one line, and no teardown at its end."""

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn

LONGEST_LINE = 20_000
"""Characters of a refusal; the flags of the host's trainer alone have 8000."""


def show(report: str) -> None:
    """Prints the report of a command; where its reader has gone, as in `| head`, that is no error."""
    try:
        print(report, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is flushed later goes nowhere too


def refuse(sentence: str, code: int = 2) -> NoReturn:
    """Exits with `sentence` in one line, whatever the values in it are made of."""
    line = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in " ".join(sentence.split()))
    if len(line) > LONGEST_LINE:
        line = f"{line[: LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 2 :]}"
    print(f"levanter-diloco: {line}", file=sys.stderr)
    sys.exit(code)


def leave(code: int = 0) -> NoReturn:
    """Ends a process whose work is done, without tearing the interpreter down.

    The host's data loader goes on fetching batches in the background, and an interpreter that is torn down
    under such a thread dies of a signal, after everything is saved and said.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):  # the reader of a --help may have gone
            stream.flush()
    os._exit(code)


def end(run: Callable[[], object]) -> NoReturn:
    """Does what a command does and ends the process: with 0, with the status of a refusal, or with 130 on Ctrl-C."""
    try:
        run()
    except KeyboardInterrupt:
        print("levanter-diloco: interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        leave(130)
    except SystemExit as exit:
        if isinstance(exit.code, int):  # refused, perhaps when the host was already at work
            leave(exit.code)
        raise
    leave()
