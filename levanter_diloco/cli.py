"""`levanter-diloco <command>`: loads the plugins, then runs the host's own program; or runs a tool of ours."""

import atexit
import contextlib
import dataclasses
import importlib
import io
import os
import sys
import types
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
    import levanter.config
    from draccus.utils import ParsingError

    def options(config: Any) -> Any:  # Any: annotated below, for the host to read
        return config

    options.__annotations__["config"] = config_class
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return levanter.config.main(options, args=args)()
    except OSError as error:
        _refuse(str(error))
    except ParsingError as error:
        _refuse(_explain(config_class, error))
    except SystemExit as exit:
        if exit.code != 2:  # --help
            raise
        usage, _, reason = complaint.getvalue().rpartition(": error: ")
        block = next((word.rpartition(".")[0] for word in reason.split() if word.startswith("--")), "--")
        flags = [word.strip("[]") for word in usage.split() if word.startswith(f"[{block}.")]
        listed = flags and "invalid choice" not in reason  # which lists the choices itself
        _refuse(reason + (f"; the options are {' '.join(flags)}" if listed else ""))


def _explain(config_class: type, error: Exception) -> str:
    """Says what is wrong with a YAML, where draccus leaves the reason or the known options out."""
    from draccus.utils import DecodingError, ParsingError

    from .errors import OptionError

    # A block that may be null has one type besides, and draccus buries what that says.
    while str(error).count("\n") == 2 and isinstance(error.__cause__, ParsingError):
        error = error.__cause__
    if isinstance(error.__cause__, OptionError):
        return str(error.__cause__)
    if not isinstance(error, DecodingError):
        hint = error.__cause__ or "a block with a type is written like trainer.diloco.outer: {type: nesterov}"
        return f"{error}: {hint}"
    if isinstance(error.__cause__, AttributeError | TypeError):  # draccus took a value for a block
        found = error.message.partition("value=")[2].partition(" into field")[0]
        block = f"{'.'.join(error.key_path)} must be a block of options"
        return f"{block}, found {found}; an empty block is {{}}" if found else f"{block}; {{option: value}} works"
    known = _known_options(config_class, error)
    return str(error) + (f"; the options are {', '.join(known)}" if known else "")


def _known_options(config_class: type, error: Any) -> list[str]:  # Any: DecodingError
    """The options of the block that `error` is about, where it is about an unknown one."""
    from draccus.choice_types import ChoiceType
    from draccus.utils import stringify_type

    block: Any = config_class
    for name in error.key_path:
        block = typing.get_type_hints(block).get(name) if dataclasses.is_dataclass(block) else None
        if types.NoneType in typing.get_args(block):
            block = typing.get_args(block)[0]
    if isinstance(block, type) and issubclass(block, ChoiceType):
        choices = block.get_known_choices()
        named = [choice for choice in choices.values() if error.message.endswith(f" {stringify_type(choice)}")]
        if not named:
            return sorted(choices) if "choice class" in error.message else []
        block = named[0]
    if not dataclasses.is_dataclass(block) or "not valid for" not in error.message:
        return []
    return [field.name for field in dataclasses.fields(block)]


def _refuse(sentence: str, code: int = 2) -> NoReturn:
    print(f"levanter-diloco: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(code)
