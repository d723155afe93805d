"""TPU slices by the names that Google Cloud gives them, such as v5p-128."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ...errors import SliceError


@dataclass(frozen=True)
class Generation:
    """One generation of TPUs."""

    compiler_name: str
    """What libtpu calls it."""

    hbm_gib: float
    """High-bandwidth memory of one JAX device that a program may use, by libtpu's own messages."""

    chips: Sequence[int]
    """Sizes of its slices."""

    counted_per_chip: int = 1
    """What the number in a slice's name counts: 2 where it counts cores."""

    devices_per_chip: int = 1
    """JAX devices; the two cores of a v4 or v5p chip act as one (megacore)."""

    megacore: bool = False
    torus: bool = False
    """Whether slices are three-dimensional."""


def _torus_sizes(largest: int) -> list[int]:
    return [4, 8, 16, 32, *range(64, largest + 1, 64)]


GENERATIONS = {
    "v4": Generation("v4", 30.75, _torus_sizes(2048), counted_per_chip=2, megacore=True, torus=True),
    "v5p": Generation("v5", 95.73, _torus_sizes(6144), counted_per_chip=2, megacore=True, torus=True),
    "v5litepod": Generation("v5e", 15.75, [1, 4, 8, 16, 32, 64, 128, 256]),
    "v6e": Generation("v6e", 31.24, [1, 4, 8, 16, 32, 64, 128, 256]),
    "tpu7x": Generation("tpu7x", 94.74, _torus_sizes(9216), counted_per_chip=2, devices_per_chip=2, torus=True),
}


@dataclass(frozen=True)
class Slice:
    """A slice of one generation."""

    generation: Generation
    chips: int

    @classmethod
    def of(cls, name: str) -> "Slice":
        """The slice that Google Cloud calls `name`.

        Raises:
            SliceError: If there is none.
        """
        family, _, number = canonical(name).rpartition("-")
        generation = GENERATIONS.get(family)
        if generation is None:
            raise SliceError(f"must be a type of {', '.join(GENERATIONS)} with a size it has; v5p-128 works")
        sizes = [chips * generation.counted_per_chip for chips in generation.chips]
        if not number.isdigit() or int(number) not in sizes:
            some = ", ".join(map(str, sizes[:8])) + (f" ... {sizes[-1]}" if len(sizes) > 8 else "")
            raise SliceError(f"must have a size that {family} has ({some}); {family}-{sizes[3]} works")
        return cls(generation, int(number) // generation.counted_per_chip)

    @property
    def devices(self) -> int:
        """JAX devices."""
        return self.chips * self.generation.devices_per_chip

    @property
    def hosts(self) -> int:
        """Machines: of four chips each, but for the flat slices that fit into one."""
        return max(self.chips // prod(self.host_shape), 1)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Chips along each axis: as near to a cube or a square as the building blocks allow."""
        if not self.generation.torus:
            short = 2 ** ((self.chips.bit_length() - 1) // 2)
            return short, self.chips // short, 1
        if self.chips < 64:
            return {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}[self.chips]
        cubes = self.chips // 64
        shapes = [
            (a, b, cubes // (a * b))
            for a in range(1, cubes + 1)
            for b in range(a, cubes // a + 1)
            if cubes % (a * b) == 0 and cubes // (a * b) >= b
        ]
        a, b, c = min(shapes, key=lambda sides: (max(sides), sum(sides)))
        return 4 * a, 4 * b, 4 * c

    @property
    def host_shape(self) -> tuple[int, int, int]:
        """Chips of one machine along each axis."""
        single = not self.generation.torus and self.chips <= 8
        return self.shape if single else (2, 2, 1)


def canonical(name: str) -> str:
    """The name the clouds use: v5e is v5litepod."""
    return name.replace("v5e-", "v5litepod-") if name.startswith("v5e-") else name
