"""YAML and flags: read as the host does, and refused with one sentence that says what is wrong with them."""

import contextlib
import dataclasses
import io
import itertools
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import draccus
import yaml
from draccus.choice_types import ChoiceType
from draccus.parsers.decoding import decode_dataclass
from draccus.utils import DecodingError, ParsingError, stringify_type

from ..errors import PATH, OptionError
from .config import DiLoCoConfig
from .kinds import check_kinds, is_block

COUNTS = {"seed", "num_train_steps", "per_device_parallelism"}
"""Options of the host's trainer that enter the arithmetic of islands, where null or true would surface late."""


def read(config_class: type, args: list[str]) -> Any:  # Any: an instance of `config_class`
    """Returns the `config_class` that a YAML and flags describe.

    Raises:
        OptionError: If they do not fit it.
    """

    import levanter.config  # here: the block alone is read without the host

    def options(config: Any) -> Any:  # Any: annotated below, for the host to read
        return config

    options.__annotations__["config"] = config_class
    # Of what is to be decoded alone, not of what its fields hold: flags of a class with a decoder have no parts.
    # pyrefly: ignore[missing-attribute]  draccus hangs it on the function
    draccus.decode.register(config_class, _decode, include_subclasses=True)
    complaint = io.StringIO()
    try:
        for path in _files(args):
            refuse_duplicates(path)
        with contextlib.redirect_stderr(complaint):
            return levanter.config.main(options, args=args)()
    except OptionError:
        raise
    except OSError as error:
        raise OptionError(str(error)) from error
    except ParsingError as error:
        raise OptionError(_explain(config_class, error)) from error
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        # The host reads the values of flags as YAML, and what is wrong with them surfaces as it is.
        raise OptionError(_explain_flags(args, error)) from error
    except SystemExit as exit:
        if exit.code != 2:  # --help
            raise
        raise OptionError(_explain_usage(complaint.getvalue())) from exit


@dataclasses.dataclass(frozen=True)
class _Trainer:
    diloco: DiLoCoConfig


@dataclasses.dataclass(frozen=True)
class _Run:
    trainer: _Trainer


def read_block(block: object) -> DiLoCoConfig:
    """Returns what `trainer.diloco: block` of a YAML stands for, by the same rules as `read` and without the host.

    Raises:
        OptionError: If it does not fit.
    """
    check_kinds(DiLoCoConfig, block, PATH)
    try:
        return decode_dataclass(_Run, {"trainer": {"diloco": block}}, ()).trainer.diloco
    except OptionError:
        raise
    except (ParsingError, TypeError, ValueError) as error:
        raise OptionError(_explain(_Run, error)) from error


def _decode(config_class: type, raw: Any, path: tuple[str, ...] = ()) -> Any:  # Any: YAML; a `config_class`
    """Decodes as draccus does, after what draccus would take without a word."""
    trainer = raw.get("trainer", {}) if isinstance(raw, dict) else {}
    for block, found in (("the YAML", raw), ("trainer", trainer)):
        if not isinstance(found, dict):
            raise OptionError(f"{block} must be a block of options, found '{found}'; trainer: {{diloco: {{}}}} works.")
    for option in COUNTS & trainer.keys():
        check_kinds(int, trainer[option], f"trainer.{option}")
    if "diloco" in trainer:
        check_kinds(DiLoCoConfig, trainer["diloco"], PATH)
    return decode_dataclass(config_class, raw, path)


def _files(args: list[str]) -> list[Path]:
    """The YAMLs that `args` name and that are files here."""
    start = next((place for place, arg in enumerate(args) if arg in ("--config_path", "--config", "--configs")), None)
    if start is None:
        return []
    # The host takes several YAMLs after one flag, the later over the earlier.
    named = itertools.takewhile(lambda arg: not arg.startswith("--"), args[start + 1 :])
    return [Path(name) for name in named if "\0" not in name and Path(name).is_file()]


def refuse_duplicates(path: Path) -> None:
    """Refuses an option that stands twice in one block: YAML readers take the last and drop the others."""
    try:
        with path.open(encoding="utf-8") as file:
            root = yaml.compose(file, yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return  # the host will say so
    for first, second in _duplicates(root, set()):
        lines = f"{first.start_mark.line + 1} and {second.start_mark.line + 1}"
        raise OptionError(f"{path}: {first.value} stands twice in one block, in lines {lines}; leave one of them out.")


def _duplicates(node: Any, seen: set[int]) -> Iterator[tuple[Any, Any]]:  # Any: nodes of PyYAML, which has no types
    """Pairs of keys of one mapping that are equal, anywhere below `node`."""
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
        return
    seen.add(id(node))  # an alias is the node it stands for, and may be a part of itself
    if isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            yield from _duplicates(entry, seen)
        return
    known: dict[str, Any] = {}
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in known:
                yield known[key.value], key
            known[key.value] = key
        yield from _duplicates(value, seen)


def _explain(config_class: type, error: Exception) -> str:
    """Says what is wrong with a YAML, where draccus leaves the reason or the known options out."""
    # A block that may be null has one type besides, and draccus buries what that says.
    while str(error).count("\n") == 2 and isinstance(error.__cause__, ParsingError):
        error = error.__cause__
    if isinstance(error.__cause__, OptionError):
        return str(error.__cause__)
    if isinstance(error.__cause__, OSError | ValueError | RecursionError | yaml.YAMLError) and "Failed to load" in str(
        error
    ):
        name = str(error).partition("name='")[2].partition("'")[0]
        return f"{name} is no YAML: {error.__cause__}"
    if not isinstance(error, DecodingError):
        hint = error.__cause__ or "a block with a type is written like trainer.diloco.outer: {type: nesterov}"
        return f"{error}: {hint}"
    if isinstance(error.__cause__, AttributeError | TypeError):  # draccus could not even try
        path, kind = ".".join(error.key_path), _kind_at(config_class, error)
        found = error.message.partition("value=")[2].partition(" into field")[0]
        if kind is not None and not is_block(kind):
            return str(error).partition(": decode_")[0]  # draccus's own function, and what that was called with
        block = f"{path} must be a block of options"
        return f"{block}, found {found}; an empty block is {{}}" if found else f"{block}; {{option: value}} works"
    known = _known_options(config_class, error)
    return str(error) + (f"; the options are {', '.join(known)}" if known else "")


def _kind_at(config_class: type, error: DecodingError) -> Any:  # Any: a type annotation
    """What stands at the path of `error`; None where that is not known."""
    kind: Any = config_class
    for name in error.key_path:
        kind = typing.get_type_hints(kind).get(name) if dataclasses.is_dataclass(kind) else None
        if types.NoneType in typing.get_args(kind):
            kind = typing.get_args(kind)[0]
    return kind


def _known_options(config_class: type, error: DecodingError) -> list[str]:
    """The options of the block that `error` is about, where it is about an unknown one."""
    block = _kind_at(config_class, error)
    if isinstance(block, type) and issubclass(block, ChoiceType):
        choices = block.get_known_choices()
        named = [choice for choice in choices.values() if error.message.endswith(f" {stringify_type(choice)}")]
        if not named:
            return sorted(choices) if "choice class" in error.message else []
        block = named[0]
    if not dataclasses.is_dataclass(block) or "not valid for" not in error.message:
        return []
    return [field.name for field in dataclasses.fields(block)]


def _explain_flags(args: list[str], error: Exception) -> str:
    """Names the flag that the host could not read."""
    pairs = [(arg, value) for arg, value in itertools.pairwise([*args, ""]) if arg.startswith("--")]
    pairs = [(*arg.split("=", 1),) if "=" in arg else (arg, value) for arg, value in pairs]
    for flag, value in pairs:
        try:
            yaml.safe_load(value)
        except (yaml.YAMLError, ValueError, RecursionError) as reason:
            return f"{flag} ({value}) is no YAML: {reason}"
    flags = [flag for flag, _ in pairs]
    for block, option in itertools.product(flags, flags):
        if option.startswith(f"{block}."):
            return f"{block} and {option} contradict each other; leave one of them out"
    return f"{' '.join(args)}: {error}"


def _explain_usage(complaint: str) -> str:
    """Lists the flags that are known, where argparse leaves them out."""
    usage, _, reason = complaint.rpartition(": error: ")
    block = next((word.rpartition(".")[0] for word in reason.split() if word.startswith("--")), "--")
    flags = [word.strip("[]") for word in usage.split() if word.startswith(f"[{block}.")]
    listed = flags and "invalid choice" not in reason  # which lists the choices itself
    return reason + (f"; the options are {' '.join(flags)}" if listed else "")
