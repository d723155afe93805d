"""The host's programs, run on a YAML and flags: the plugins first, then `main` of a module on its parsed options."""

import importlib
import typing

from ..console import refuse
from ..errors import ModelError, OptionError, RunError
from ..options.plugins import load_plugins


def run(module: str, args: list[str]) -> None:
    """Runs `main` of `module` on `args`; exits with one line, and with 2 on bad input or 1 on a run that is lost."""
    try:
        load_plugins()
        # Only now: a plugin that does not load is refused at once, the host takes 15 seconds to import.
        from ..options.reading import read

        program = importlib.import_module(module)
        program.main(read(typing.get_type_hints(program.main)["config"], args))
    except (OptionError, ModelError) as error:
        refuse(str(error))
    except RunError as error:
        refuse(str(error), code=1)
