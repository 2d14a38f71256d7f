"""Memory-bound kernels as recipes: a kernel's operands and the call that runs it.

A recipe makes a case of a number of bytes (`passes` says which count), for the scenario's kernels, and covering designs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from calibration.measure.case import DESIGN, Case
from calibration.measure.device import Device
from calibration.measure.operands import DTYPES, Operands, rotated
from calibration.measure.passes import PASSES
from calibration.measure.timing import Call
from sim.program.kernels import Memory

WIDTH = 2048
"""Of a row, where nobody says: the hidden size of a small model."""
SMALLEST_BYTES, LARGEST_BYTES = 64 << 10, 1 << 30
STEP = 4
"""Between the sizes of a design."""
CPU_LARGEST_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """What a recipe's operands are made for: `rows` of `width` elements."""

    rows: int
    width: int

    @property
    def both(self) -> tuple[int, int]:
        return self.rows, self.width


@dataclass(frozen=True, slots=True)
class Recipe:
    """One kernel, an entry of PASSES; `operands` makes what `call` takes."""

    name: str
    operands: Callable[[Operands, Shape], Sequence[Any]]
    call: Callable[..., object]

    @property
    def family(self) -> str:
        return PASSES[self.name].family

    def bytes_per_element(self, dtype: str) -> float:
        moved = PASSES[self.name]
        return moved.passes * DTYPES[dtype].itemsize + moved.extra_bytes

    def shape(self, size_bytes: int, dtype: str, width: int) -> Shape:
        """Rows of `width` that move about so many bytes; a shorter row where there is not even one."""
        elements = max(round(size_bytes / self.bytes_per_element(dtype)), 1)
        width = min(width, elements)
        return Shape(max(round(elements / width), 1), width)

    def case(
        self, size_bytes: int, dtype: str, width: int = WIDTH, script: str = "", origin: str = DESIGN, family: str = ""
    ) -> Case:
        """The kernel over `size_bytes` in all; `family`: as the program calls it, where it knows another name."""
        shape = self.shape(size_bytes, dtype, width)

        def build(device: Device) -> Call:
            maker = Operands(device, dtype)
            return rotated(device, lambda: self.operands(maker, shape), self.call)

        work = Memory(family or self.family, size_bytes)
        return Case(script, work, build, self.name, origin=origin, bytes_needed=2 * size_bytes)

    def exact_bytes(self, size_bytes: int, dtype: str, width: int = WIDTH) -> int:
        """What the shape of about `size_bytes` really moves."""
        shape = self.shape(size_bytes, dtype, width)
        return max(round(shape.rows * shape.width * self.bytes_per_element(dtype)), 1)


def design(recipes: Sequence[Recipe], device: Device, script: str, width: int = WIDTH) -> Iterator[Case]:
    """Each recipe over sizes a factor apart, recipes in turn; in the dtypes that training uses."""
    for size in sizes(device):
        for recipe in recipes:
            for dtype in ("fp32",) if device.name == "cpu" else ("bf16",):
                yield recipe.case(recipe.exact_bytes(size, dtype, width), dtype, width, script)


def sizes(device: Device) -> list[int]:
    """A large one first, which shows the rate even if time is short; the smallest, which shows what starting takes."""
    largest = CPU_LARGEST_BYTES if device.name == "cpu" else LARGEST_BYTES
    smallest, *more = (SMALLEST_BYTES * STEP**power for power in range(64) if SMALLEST_BYTES * STEP**power <= largest)
    first = more.pop(-2)
    return [first, smallest, *more]


def same(o: Operands, shape: Shape) -> Sequence[Any]:
    return (o.random(*shape.both),)


def two(o: Operands, shape: Shape) -> Sequence[Any]:
    return o.random(*shape.both), o.random(*shape.both)


def three(o: Operands, shape: Shape) -> Sequence[Any]:
    return o.random(*shape.both), o.random(*shape.both), o.random(*shape.both)
