"""Collectives in the text of a compiled program."""

import re
from dataclasses import dataclass
from math import prod

import numpy as np

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "u16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8}

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all"
_LINE = re.compile(rf"= (?P<shape>.*?) (?P<kind>{_KINDS})(?:-start)?\((?P<operands>[^)]*)\)(?P<rest>.*)")


@dataclass(frozen=True)
class Collective:
    kind: str
    nbytes: int
    """Bytes of its results on one device."""

    groups: tuple[tuple[int, ...], ...]
    """Devices that talk to each other, by their place in the mesh; empty means all."""

    def crosses(self, island_size: int) -> bool:
        """Whether a group holds devices of several islands, each of `island_size` devices in a row."""
        return not self.groups or any(len({device // island_size for device in group}) > 1 for group in self.groups)


def collectives(text: str) -> list[Collective]:
    found = []
    for line in text.splitlines():
        if match := _LINE.search(line):
            shapes = re.findall(r"(\w+)\[([\d,]*)\]", match["shape"])
            nbytes = sum(BYTES[dtype] * prod(int(n) for n in dims.split(",") if n) for dtype, dims in shapes)
            found.append(Collective(match["kind"], nbytes, _groups(match["rest"])))
    return found


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
