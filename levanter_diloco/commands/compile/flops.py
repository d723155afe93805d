"""Floating-point operations of a compiled program's matrix products, loops counted as often as they run."""

import re
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from .hlo import Instruction, Program

CALLS = ("calls", "to_apply", "body", "true_computation", "false_computation")
"""Attributes that name a computation whose products count once for each run of the instruction."""


@dataclass(frozen=True)
class Flops:
    """Counts `dot` and `convolution`; what a kernel of its own (`custom-call`) computes is not seen."""

    program: Program

    def of(self, one: Instruction, computation: str) -> int:
        """Operations of one instruction of `computation`, with all that it calls."""
        if one.kind in ("dot", "convolution"):
            shapes = self._shapes[computation]
            left, right = (shapes[operand] for operand in one.operands[:2])
            return _dot(one, left) if one.kind == "dot" else _convolution(one, left, right)
        if one.kind in ("reduce", "all-reduce", "sort", "scatter"):  # these apply scalars' functions
            return 0
        each = sum(self._of_computation(name) for name in self._called(one))
        return each * self._trips(one) if one.kind == "while" else each

    @cached_property
    def of_entry(self) -> list[int]:
        """Operations of each instruction of the entry computation, in its order."""
        entry = self.program.entry
        return [self.of(one, entry) for one in self.program.computations[entry]]

    @cached_property
    def _shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        return {
            name: {one.name: one.shapes[0][1] for one in instructions if one.shapes}
            for name, instructions in self.program.computations.items()
        }

    @cached_property
    def _counted(self) -> dict[str, int]:
        return {}

    def _of_computation(self, name: str) -> int:
        if name not in self._counted:
            self._counted[name] = sum(self.of(one, name) for one in self.program.computations[name])
        return self._counted[name]

    def _called(self, one: Instruction) -> list[str]:
        return [name for attribute in CALLS if (name := one.called(attribute)) in self.program.computations]

    def _trips(self, loop: Instruction) -> int:
        """The bound that the loop's condition compares its counter with."""
        condition = self.program.computations[loop.called("condition") or ""]
        bounds = [int(one.arguments) for one in condition if one.kind == "constant" and one.arguments.isdigit()]
        return max(bounds, default=1)


def _dot(one: Instruction, left: tuple[int, ...]) -> int:
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)
    sizes = [left[int(dim)] for dim in contracted[1].split(",") if dim] if contracted else []
    return 2 * prod(one.shapes[0][1]) * prod(sizes)


def _convolution(one: Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Operations of a convolution, as which a TPU writes most products; what falls into the padding is not counted."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.rest)
    assert labels is not None
    lhs, rhs, out = (
        dict(zip(names, sizes, strict=True))
        for names, sizes in zip(labels.groups(), (left, right, one.shapes[0][1]), strict=True)
    )
    pairs = 1
    for dim in filter(str.isdigit, labels[1]):
        low = int(_window(one, "pad", dim, "0_0").split("_")[0])
        stride, base, kernel = (int(_window(one, name, dim, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
        # Which inputs each kernel element meets: off the edge or between dilated rows it multiplies nothing.
        place = np.arange(out[dim])[:, None] * stride + np.arange(rhs[dim]) * kernel - low
        pairs *= int(((place >= 0) & (place <= (lhs[dim] - 1) * base) & (place % base == 0)).sum())
    return 2 * pairs * out["b"] * out["f"] * rhs["i"]


def _window(one: Instruction, name: str, dim: str, default: str) -> str:
    """The value of `name` in the window for spatial dimension `dim`."""
    found = re.search(rf"window=\{{[^}}]*\b{name}=([\w-]+)", one.rest)
    return found[1].split("x")[int(dim)] if found else default
