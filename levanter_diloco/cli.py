"""`levanter-diloco <command>`: loads the plugins, then runs the host's own program; or runs a tool of ours."""

import atexit
import importlib
import os
import sys
import typing
from importlib.metadata import entry_points
from typing import Any, NoReturn

COMMANDS = {"train_lm": "levanter_diloco.main.train_lm"}
"""Programs of the host: the module's `main` takes a parsed config."""

TOOLS = {
    "plan": "levanter_diloco.plan",
    "bench": "levanter_diloco.bench",
    "compile": "levanter_diloco.compile",
    "export": "levanter_diloco.export",
    "inspect": "levanter_diloco.inspect_checkpoint",
}
"""Commands of our own: the module's `main` takes the arguments and parses them itself."""

PLUGINS = "levanter.plugins"

LONGEST_LINE = 20_000
"""Characters of a refusal; the flags of the host's trainer alone have 8000."""

USAGE = f"""usage: levanter-diloco COMMAND --config_path X.yaml [--any.option value ...]

commands: {", ".join([*COMMANDS, *TOOLS])}
  levanter-diloco COMMAND --help lists every option."""


def command() -> NoReturn:
    """The console script."""
    try:
        main()
    except KeyboardInterrupt:
        print("levanter-diloco: interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        leave(130)
    except SystemExit as exit:
        if isinstance(exit.code, int):  # refused, perhaps when the host was already at work
            leave(exit.code)
        raise
    leave()


def main(argv: list[str] | None = None) -> None:
    """Runs a command; exits with 2 and one line on bad input."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
    elif args[0] in TOOLS:
        importlib.import_module(TOOLS[args[0]]).main(args[1:])
    elif args[0] not in COMMANDS:
        _refuse(f"unknown command {args[0]!r}; the commands are {', '.join([*COMMANDS, *TOOLS])}")
    else:
        run(COMMANDS[args[0]], args[1:])


def run(module: str, args: list[str]) -> None:
    """Loads every plugin of the group `levanter.plugins`, then runs `main` of `module` on the options in `args`."""
    load_plugins()
    # Only now, here and below: --help and a wrong command answer at once, the host takes 15 seconds to import.
    from .errors import ModelError, OptionError, RunError

    program = importlib.import_module(module)
    config_class = typing.get_type_hints(program.main)["config"]
    config = parse(config_class, args)
    try:
        program.main(config)
    except (OptionError, ModelError) as error:
        _refuse(str(error))
    except RunError as error:
        _refuse(str(error), code=1)


def load_plugins() -> None:
    """Loads every entry point of the group: a module registers by being imported, a function by being called."""
    for plugin in entry_points(group=PLUGINS):
        try:
            loaded = plugin.load()
        except (ImportError, AttributeError) as error:
            package = plugin.dist.name if plugin.dist else "unknown"
            _refuse(f"the plugin {plugin.name} = {plugin.value} of the package {package} does not load: {error}")
        if callable(loaded):
            loaded()


def leave(code: int = 0) -> NoReturn:
    """Ends a process whose work is done, without tearing the interpreter down.

    The host's data loader goes on fetching batches in the background, and an interpreter that is torn down
    under such a thread dies of a signal, after everything is saved and said.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def parse(config_class: type, args: list[str]) -> Any:  # Any: an instance of `config_class`
    """Parses a YAML and flags as the host does; exits with 2 and one line where they do not fit `config_class`."""
    from .errors import OptionError
    from .reading import read

    try:
        return read(config_class, args)
    except OptionError as error:
        _refuse(str(error))


def _refuse(sentence: str, code: int = 2) -> NoReturn:
    """Says it in one line, whatever the values in it are made of."""
    line = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in " ".join(sentence.split()))
    if len(line) > LONGEST_LINE:
        line = f"{line[: LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 2 :]}"
    print(f"levanter-diloco: {line}", file=sys.stderr)
    sys.exit(code)
