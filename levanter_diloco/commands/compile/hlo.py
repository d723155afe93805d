"""HLO text of a compiled program, parsed: its instructions, its collectives and its transfers between slices."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

BITS = {
    "token": 0,  # orders instructions, holds nothing
    "pred": 8,
    **{f"{sign}{bits}": bits for sign in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
    "f4e2m1fn": 4,
    **dict.fromkeys(("f8e3m4", "f8e4m3", "f8e4m3b11fnuz", "f8e4m3fn", "f8e4m3fnuz", "f8e5m2", "f8e5m2fnuz"), 8),
    "f8e8m0fnu": 8,
    "bf16": 16,
    "f16": 16,
    "f32": 32,
    "f64": 64,
    "c64": 64,
    "c128": 128,
}
"""Bits of an element of each type (XLA's `PrimitiveType`); those below a byte are packed."""

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)

_HEAD = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
_LINE = re.compile(
    r"\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<shape>.*?) (?P<kind>[a-z][a-z0-9-]*)\((?P<arguments>[^)]*)\)(?P<rest>.*)"
)
_SHAPE = re.compile(r"\b([a-z]+[0-9]*\w*)\[([\d,]*)\]")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    kind: str
    """The opcode."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """Element type and sizes of each array of its result."""

    arguments: str
    """What stands in its parentheses: names of operands, or a constant's value."""

    rest: str
    """What follows: attributes."""

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.-]+)", self.arguments)

    def called(self, attribute: str) -> str | None:
        """Name of the computation that `attribute` gives."""
        match = re.search(rf"\b{attribute}=%?([\w.-]+)", self.rest)
        return match and match[1]


@dataclass(frozen=True)
class Program:
    """A compiled program; each computation is a list of instructions, in the order they are scheduled in."""

    computations: Mapping[str, list[Instruction]]
    entry: str

    @classmethod
    def of(cls, text: str) -> "Program":
        computations: dict[str, list[Instruction]] = {"": []}
        name = entry = ""
        for line in text.splitlines():
            if match := _LINE.match(line):
                shapes = tuple(
                    (dtype, tuple(int(n) for n in sizes.split(",") if n))
                    for dtype, sizes in _SHAPE.findall(match["shape"])
                )
                one = Instruction(match["name"], match["kind"], shapes, match["arguments"], match["rest"])
                computations[name].append(one)
            elif match := _HEAD.match(line):
                name = match["name"]
                computations[name] = []
                entry = name if match["entry"] else entry
        return cls(computations, entry)

    def __iter__(self) -> Iterator[Instruction]:
        for instructions in self.computations.values():
            yield from instructions


@dataclass(frozen=True)
class Collective:
    """An exchange over the links inside a slice, or between the devices of a CPU backend."""

    kind: str
    name: str
    nbytes: int
    """Bytes of its results on one device."""

    groups: tuple[tuple[int, ...], ...]
    """Devices that talk to each other, by their place in the mesh; empty means all."""

    @property
    def sent(self) -> int:
        """Bytes that one device hands over."""
        return self.nbytes // len(self.groups[0]) if self.kind == "all-gather" and self.groups else self.nbytes

    def crosses(self, island_size: int) -> bool:
        """Whether a group holds devices of several islands, each of `island_size` devices in a row."""
        return not self.groups or any(len({device // island_size for device in group}) > 1 for group in self.groups)


@dataclass(frozen=True)
class Transfer:
    """An exchange between slices: a `send` that the host's runtime carries over DCN, and its `recv`."""

    kind: str
    name: str
    nbytes: int
    """Bytes that one device hands over, padding included."""

    start: int
    """Place of the `send` in the entry computation's schedule."""

    done: int
    """Place of the `recv-done`: what is received can be read from here on."""


def collectives(program: Program) -> list[Collective]:
    """The collectives of a program that no runtime of the host carries."""
    found = []
    for one in program:
        kind = one.kind.removesuffix("-start")
        if kind in COLLECTIVES:
            found.append(Collective(kind, one.name, nbytes(one.shapes), _groups(one.rest)))
    return found


def transfers(program: Program) -> list[Transfer]:
    """The exchanges between slices, in the order they start in."""
    entry = program.computations[program.entry]
    received: dict[str, str] = {}
    done: dict[str, int] = {}
    for place, one in enumerate(entry):
        if one.kind == "recv":
            received[one.name] = _attribute(one, "rendezvous")
        elif one.kind == "recv-done":
            done[received[one.operands[0]]] = place
    return [
        Transfer(
            _attribute(one, "megascale_transfer_type").lower().replace("_", "-"),
            _attribute(one, "rendezvous"),
            nbytes(one.shapes[:1]),
            place,
            done[_attribute(one, "rendezvous")],
        )
        for place, one in enumerate(entry)
        if one.kind == "send" and "megascale" in one.rest
    ]


def nbytes(shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> int:
    """Bytes of arrays of these shapes.

    Raises:
        ValueError: If XLA has an element type that is not in `BITS`. A guess would be a wrong count of what is sent.
    """
    total = 0
    for dtype, sizes in shapes:
        if dtype not in BITS:
            written = f"{dtype}[{','.join(map(str, sizes))}]"
            raise ValueError(f"the program holds {written}, and the bytes of an element of {dtype} are not known")
        total += -(-BITS[dtype] * prod(sizes) // 8)
    return total


def _attribute(one: Instruction, name: str) -> str:
    match = re.search(rf'_xla_(?:host_transfer_)?{name}="([^"]*)"', one.rest)
    if match is None:
        raise ValueError(f"no {name} in {one}")
    return match[1]


def _groups(rest: str) -> tuple[tuple[int, ...], ...]:
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", rest):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d, ]+)\}", match[1]))
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        shape, dims = ([int(n) for n in match[i].split(",")] for i in (1, 2))
        devices = np.arange(prod(dims)).reshape(dims)
        if match[3]:
            devices = devices.transpose([int(n) for n in match[3].split(",")])
        return tuple(map(tuple, devices.reshape(shape).tolist()))
    if match := re.search(
        r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}, (?:use_global|to_apply|dimensions|channel|metadata)", rest
    ):
        axes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        inside = re.fullmatch(r"'\w+'(?:, ?'\w+')*", match[2]) and re.findall(r"'(\w+)'", match[2])
        if inside:
            names = [name for name in axes if name not in inside] + inside
            devices = np.arange(prod(map(int, axes.values()))).reshape([int(size) for size in axes.values()])
            devices = devices.transpose([list(axes).index(name) for name in names])
            return tuple(map(tuple, devices.reshape(-1, prod(int(axes[name]) for name in inside)).tolist()))
    if re.search(r"replica_groups=(\{\}|\[\])", rest):
        return ()
    raise ValueError(f"no groups in {rest}")
