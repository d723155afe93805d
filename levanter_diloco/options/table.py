"""The table of options in Markdown, made from the texts under the fields of `DiLoCoConfig`.

    python -m levanter_diloco.options.table [--write FILE]

prints it, or puts it between the markers `<!-- options -->` and `<!-- /options -->` of FILE.
"""

import argparse
import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

from ..errors import PATH
from ..network.link import LinkConfig
from .config import DiLoCoConfig
from .outer import OuterOptimizerConfig

BEGIN, END = "<!-- options -->", "<!-- /options -->"


def field_texts(config: type) -> dict[str, str]:
    """The text under each field of a dataclass, its bases' included; Python drops them, so the source is read."""
    texts: dict[str, str] = {}
    for one in reversed(config.__mro__):
        if not dataclasses.is_dataclass(one):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        assert isinstance(tree, ast.ClassDef)
        for option, text in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(option, ast.AnnAssign)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                texts[ast.unparse(option.target)] = " ".join(str(text.value.value).split())
    return texts


def table() -> str:
    """All options, those of `outer` and `link` in tables of their own."""
    return "\n".join([*_block(PATH, DiLoCoConfig), "", *_outer(), "", *_block(f"{PATH}.link", LinkConfig)])


def replaced(text: str) -> str:
    """`text` with the table between its markers.

    Raises:
        ValueError: If it has no markers.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the file must have the lines {BEGIN} and {END}, between which the table goes.")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _block(path: str, config: type) -> Iterator[str]:
    yield from _head(path)
    texts = field_texts(config)
    for option in dataclasses.fields(config):
        yield _row(option.name, _shown(option), texts[option.name])


def _outer() -> Iterator[str]:
    """The options of the built-in outer optimizers: each once, with the defaults of those that have another."""
    yield from _head(f"{PATH}.outer")
    first = OuterOptimizerConfig.default_choice_name()
    known = OuterOptimizerConfig.get_known_choices()
    ours = {name: kind for name, kind in known.items() if kind.__module__ == OuterOptimizerConfig.__module__}
    kinds = {first: ours[first], **ours}
    yield _row("type", first, f"One of {', '.join(f'`{name}`' for name in kinds)}, or a registered optimizer.")
    texts = {name: text for kind in kinds.values() for name, text in field_texts(kind).items()}
    for option in dict.fromkeys(option.name for kind in kinds.values() for option in dataclasses.fields(kind)):
        defaults = {
            name: _shown(field)
            for name, kind in kinds.items()
            for field in dataclasses.fields(kind)
            if field.name == option
        }
        usual = next(iter(defaults.values()))
        others = [f"{name}: {default}" for name, default in defaults.items() if default != usual]
        whose = "" if len(defaults) == len(kinds) else f"Of {', '.join(f'`{name}`' for name in defaults)}. "
        yield _row(option, f"{usual} ({', '.join(others)})" if others else usual, whose + texts[option])


def _head(path: str) -> list[str]:
    return [f"| option `{path}.` | default | meaning |", "|---|---|---|"]


def _row(name: str, default: str, meaning: str) -> str:
    return f"| `{name}` | {default} | {meaning.replace('|', chr(92) + '|')} |"


def _shown(option: dataclasses.Field) -> str:
    """A default in the words of YAML."""
    if option.default_factory is not dataclasses.MISSING:
        default = option.default_factory()
        return default.name if isinstance(default, OuterOptimizerConfig) else str(default)
    default = option.default
    return str(default).lower() if isinstance(default, bool) else "unset" if default is None else str(default)


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints the table of options, or writes it into a file.")
    parser.add_argument("--write", metavar="FILE", type=Path, help=f"put it between {BEGIN} and {END} of FILE")
    path = parser.parse_args().write
    if path is None:
        print(table())
    else:
        path.write_text(replaced(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
