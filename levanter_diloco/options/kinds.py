"""Kinds of options: what may stand where in `trainer.diloco`, told from the values as they are written.

draccus takes null for anything, true for 1, and a list without entries for a block; these rules come before it.
What it refuses by itself, with the option's path, is left to it.
"""

import types
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from draccus.choice_types import ChoiceType

from ..errors import OptionError

LARGEST = {int: 2**31 - 1, float: 3.4e38}
"""Steps are counted in 32 bits, and numbers end up as f32."""

WORDS = {
    bool: "true or false",
    int: "a whole number that fits 32 bits",
    float: "a finite number that fits an f32",
    str: "a text",
    list: "a list",
    dict: "a mapping",
    tuple: "a list",
    Path: "a path",
}

EXAMPLES = {
    bool: "true",
    int: 2,
    float: 1.5,
    str: "one in quotes",
    list: [0, 2],
    dict: "{name: 1.0}",
    tuple: [0, 2],
    Path: "a/file",
}

WRITTEN = {str: str | int | float, list: list, dict: dict, tuple: list, Path: str}
"""What YAML has for a kind that is no number, truth value or choice."""


def check_kinds(kind: Any, raw: object, path: str, works: object = None) -> None:  # Any: a type annotation
    """Checks that `raw`, as YAML or a flag has it, can be a `kind`, and so all that is in it.

    Args:
        kind: A dataclass, a number, text, a truth value, a choice, a list, or a union of these.
        raw: The value.
        path: Where it stands.
        works: A value that works; without one, leaving it out where null is a `kind`, else an example.

    Raises:
        OptionError: If it is null, of another kind, or too large.
    """
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    optional, kinds = types.NoneType in kinds, [one for one in kinds if one is not types.NoneType]
    if raw is None and optional:
        return
    if is_block(kinds[0]):
        _check_block(kinds[0], raw, path)
        return
    for one in kinds:
        for place, entry_kind, entry in _entries(one, raw):
            check_kinds(entry_kind, entry, f"{path}[{place}]")
    if not any(_fits(one, raw) for one in kinds):
        if works in (None, ""):
            works = "leaving it out" if optional else _example(kinds[0])
        rule = " or ".join(map(_words, kinds))
        raise OptionError(f"{path} ({_shown(raw)}) must be {rule}; {_shown(works)} works.")


def is_block(kind: Any) -> bool:  # Any: a type annotation
    """Whether YAML has a block of options for a `kind`."""
    return isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, ChoiceType))


def _check_block(block: Any, raw: object, path: str) -> None:  # Any: a dataclass or a `ChoiceType`
    if not isinstance(raw, dict):
        raise OptionError(f"{path} must be a block of options, found {_shown(raw)}; {{option: value}} works.")
    options = dict(raw)
    if issubclass(block, ChoiceType):
        choices = block.get_known_choices()
        name = options.pop("type", block.default_choice_name())
        if not isinstance(name, str):
            known = ", ".join(sorted(choices))
            raise OptionError(f"{path}.type ({_shown(name)}) must be one of {known}; {min(choices)} works.")
        if name not in choices:
            return
        block = choices[name]
    kinds = get_type_hints(block)
    for option in fields(block):
        if option.name in options:
            default = None if option.default is MISSING else option.default
            check_kinds(kinds[option.name], options[option.name], f"{path}.{option.name}", default)


def _entries(kind: Any, raw: object) -> Iterator[tuple[object, Any, object]]:  # Any: type annotations
    """Place, kind and value of what is in a list, mapping or tuple, where YAML has one for it."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is dict and isinstance(raw, dict):
        yield from ((place, inside[1], entry) for place, entry in raw.items())
    elif origin in (list, tuple) and isinstance(raw, list):
        # `tuple[int, float]` names a kind for each place, `tuple[int, ...]` and `list[int]` one for all.
        each = inside[:1] * len(raw) if origin is list or inside[1:] == (...,) else inside
        yield from zip(range(len(raw)), each, raw, strict=False)  # draccus counts them


def _fits(kind: Any, raw: object) -> bool:  # Any: a type annotation
    """Whether `raw` is a `kind`, or a text that draccus reads as one or refuses."""
    origin = get_origin(kind) or kind
    if kind is Any:
        return True
    if kind is bool:
        return isinstance(raw, bool) or raw in ("true", "false")
    if origin is Literal:
        return any(raw == choice and type(raw) is type(choice) for choice in get_args(kind))
    if kind not in LARGEST:
        # Of a kind that we do not know draccus has the word.
        return origin not in WRITTEN or (isinstance(raw, WRITTEN[origin]) and not isinstance(raw, bool))
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        return False
    try:
        return abs(kind(raw)) <= LARGEST[kind]
    except OverflowError:
        return kind is int  # of a float that is no int
    except ValueError:
        return True


def _words(kind: Any) -> str:  # Any: a type annotation
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    origin = get_origin(kind) or kind
    return WORDS.get(origin, f"a {getattr(origin, '__name__', origin)}")


def _example(kind: Any) -> object:  # Any: a type annotation
    if get_origin(kind) is Literal:
        return get_args(kind)[0]
    return EXAMPLES.get(get_origin(kind) or kind, "another value")


def _shown(value: object) -> str:
    """`value` in the words of YAML."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
