"""`levanter-diloco <command>`: loads the plugins, then runs the host's own program."""

import importlib
import sys
from importlib.metadata import entry_points

COMMANDS = {"train_lm": "levanter_diloco.main.train_lm"}

PLUGINS = "levanter.plugins"

USAGE = f"""usage: levanter-diloco COMMAND --config_path X.yaml [--any.option value ...]

commands: {", ".join(COMMANDS)}
  levanter-diloco COMMAND --help lists every option."""


def main(argv: list[str] | None = None) -> None:
    """Runs a command; exits with 2 and one line on bad input."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return
    if args[0] not in COMMANDS:
        sys.exit(f"levanter-diloco: unknown command {args[0]!r}; the commands are {', '.join(COMMANDS)}")
    run(COMMANDS[args[0]], args[1:])


def run(module: str, args: list[str]) -> None:
    """Loads every plugin of the group `levanter.plugins`, then runs `main` of `module` on the parsed options."""
    for plugin in entry_points(group=PLUGINS):
        plugin.load()()
    program = importlib.import_module(module)
    import draccus
    import levanter.config

    try:
        levanter.config.main(program.main, args=args)()
    except draccus.utils.ParsingError as error:
        sys.exit(f"levanter-diloco: {error}")
