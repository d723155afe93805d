"""Errors that a user sees: each one sentence with what would work."""

PATH = "trainer.diloco"


class OptionError(ValueError):
    """Bad input: one sentence with the option's YAML path, its value, the rule and a value that works."""


class ModelError(TypeError):
    """A model whose structure the options do not fit; likewise one sentence."""


class RunError(RuntimeError):
    """A run that cannot go on: one sentence with what happened, at which step, and what would work."""


class DamagedCheckpoint(OptionError):
    """A checkpoint that cannot be read as it was written: one sentence that names it and what is wrong."""

    def __init__(self, path: str, reason: str):
        super().__init__(f"the checkpoint {path} is damaged: {reason}.")
        self.path, self.reason = path, reason


class BadInput(Exception):
    """One sentence: the flag or option, its value, the rule, and a value or a flag that works.

    No ValueError: argparse would hide the sentence behind one of its own.
    """


class SliceError(ValueError):
    """What a slice's name must be, and one that works."""


def option_error(option: str, value: object, rule: str, works: object) -> OptionError:
    """Builds the sentence for an option of the block."""
    return OptionError(f"{PATH}.{option} ({value}) must {rule}; {works} works.")
