"""Reports of commands: dataclasses of figures that render as lines of text and as JSON."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..console import show


@dataclass(frozen=True)
class Report:
    """What a command found. The names of its fields, and of those of the dataclasses in it, are those of its JSON.

    One name means the same in every command: `sync_period` is H as asked for, `effective_period` the one in effect.
    """

    def lines(self) -> Iterator[str]:
        """The report in words, line by line."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """Every figure, by its field's name."""
        return asdict(self)

    def show(self, as_json: bool) -> None:
        """Prints the report in one form or the other."""
        show(json.dumps(self.to_json(), indent=2) if as_json else "\n".join(self.lines()))
