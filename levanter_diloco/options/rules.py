"""Rules of options: a value that breaks one is refused with the option's path, the rule and what works."""

from ..errors import option_error


def require_one_of(choices: tuple[str, ...], option: str, value: str) -> None:
    """Refuses a `value` that is none of `choices`."""
    require(value in choices, option, value, f"be one of {', '.join(choices)}", choices[0])


def require(holds: bool, option: str, value: object, rule: str, works: object) -> None:
    """Refuses `value` unless `holds`; `rule` follows "must", `works` is a value that is taken."""
    if not holds:
        raise option_error(option, value, rule, works)
