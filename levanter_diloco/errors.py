"""What is raised on bad input: one sentence that says what would work."""

PATH = "trainer.diloco"


class OptionError(ValueError):
    """Bad input: one sentence with the option's YAML path, its value, the rule and a value that works."""


class ModelError(TypeError):
    """A model whose structure the options do not fit; likewise one sentence."""


class RunError(RuntimeError):
    """A run that cannot go on: one sentence with what happened, at which step, and what would work."""


def option_error(option: str, value: object, rule: str, works: object) -> OptionError:
    """Builds the sentence for an option of the block."""
    return OptionError(f"{PATH}.{option} ({value}) must {rule}; {works} works.")
