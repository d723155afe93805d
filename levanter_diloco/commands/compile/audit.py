"""Audit of a compiled program: memory of a device, FLOPs, and exchanges with other islands, read from its HLO."""

from dataclasses import dataclass, field
from typing import Any

import jax

from .flops import Flops
from .hlo import Program, collectives, transfers


@dataclass(frozen=True)
class Memory:
    """Bytes of HBM that one device needs to run a program."""

    arguments: int
    outputs: int
    """Without those that take the place of a donated argument."""

    temporaries: int
    code: int
    total: int = field(init=False)

    def __post_init__(self) -> None:
        # A field and no property, so that it stands in the report's JSON.
        object.__setattr__(self, "total", self.arguments + self.outputs + self.temporaries + self.code)

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> "Memory":
        stats: Any = compiled.memory_analysis()  # Any: each backend's own class
        return cls(
            stats.argument_size_in_bytes,
            stats.output_size_in_bytes - stats.alias_size_in_bytes,
            stats.temp_size_in_bytes,
            stats.generated_code_size_in_bytes,
        )


@dataclass(frozen=True)
class Exchange:
    """One collective between islands."""

    kind: str
    name: str
    sent_bytes: int
    """Bytes that the devices of one island hand over, padding included."""

    overlapped: bool | None = None
    """Whether it starts before the first loop over layers and is awaited after the last; `None`: not known."""

    flops_meanwhile: float | None = None
    """Share of the program's matrix products that is scheduled between its start and its end."""


@dataclass(frozen=True)
class Audit:
    """The findings on one program."""

    memory: Memory
    flops: int
    """Of the matrix products that one device computes; see `Flops`."""

    exchanges: tuple[Exchange, ...]

    @classmethod
    def of(cls, compiled: jax.stages.Compiled, island_size: int) -> "Audit":
        """Reads a program whose islands have `island_size` devices each, in the mesh's order."""
        program = Program.of(compiled.as_text() or "")
        flops = Flops(program).of_entry
        inside = [
            Exchange(one.kind, one.name, one.sent * island_size)
            for one in collectives(program)
            if one.crosses(island_size)
        ]
        exchanges = (*_between_slices(program, flops, island_size), *inside)
        return cls(Memory.of(compiled), sum(flops), exchanges)

    @property
    def sent_bytes(self) -> int:
        """Bytes that the devices of one island hand to exchanges with others."""
        return sum(one.sent_bytes for one in self.exchanges)


def _between_slices(program: Program, flops: list[int], island_size: int) -> list[Exchange]:
    # The layers' forward and backward passes are the loops with matrix products; what starts before the first of them
    # and ends after the last has the whole step's compute to hide behind.
    # The loops over layers, forward and backward, are those that multiply.
    loops = [
        place
        for place, one in enumerate(program.computations[program.entry])
        if one.kind == "while" and flops[place] > 0
    ]
    found = []
    for one in transfers(program):
        overlapped = bool(loops) and one.start < loops[0] and one.done > loops[-1]
        share = sum(flops[one.start : one.done]) / max(sum(flops), 1)
        found.append(Exchange(one.kind, one.name, one.nbytes * island_size, overlapped, share))
    return found
