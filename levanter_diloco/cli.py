"""Command line `levanter-diloco COMMAND`: dispatches to a program of the host or to a tool of ours."""

import importlib
import sys
from typing import NoReturn

from .console import end, refuse, show

PROGRAMS = {"train_lm": "levanter_diloco.main.train_lm"}
"""Programs of the host: the module's `main` takes a parsed config."""

TOOLS = {
    "plan": "levanter_diloco.commands.plan.command",
    "bench": "levanter_diloco.commands.bench.command",
    "compile": "levanter_diloco.commands.compile.command",
    "export": "levanter_diloco.commands.export",
    "inspect": "levanter_diloco.commands.inspect",
}
"""Commands of our own: the module's `main` takes the arguments and parses them itself."""

USAGE = f"""usage: levanter-diloco COMMAND --config_path X.yaml [--any.option value ...]

commands: {", ".join([*PROGRAMS, *TOOLS])}
  levanter-diloco COMMAND --help lists every option."""


def command() -> NoReturn:
    """The console script."""
    end(main)


def main(argv: list[str] | None = None) -> None:
    """Runs a command; exits with 2 and one line on bad input."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help"):
        show(USAGE)
    elif args[0] in TOOLS:
        importlib.import_module(TOOLS[args[0]]).main(args[1:])
    elif args[0] in PROGRAMS:
        # Only now: --help and a wrong command answer at once.
        from .main.program import run

        run(PROGRAMS[args[0]], args[1:])
    else:
        refuse(f"unknown command {args[0]!r}; the commands are {', '.join([*PROGRAMS, *TOOLS])}")
