"""The graph of a compiled region: forward and backward of one function, as AOTAutograd traces them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import TYPE_CHECKING, Literal

from sim.model.calls import Shape
from sim.model.calls import Tensor as ModelTensor
from sim.program.kernels import ITEM_BYTES
from sim.runtime.strides import Strides

if TYPE_CHECKING:
    from sim.runtime.tape import Tape
    from sim.runtime.tensor import Tensor


class Kind(Enum):
    """What makes a value. Pointwise operators and reductions are fused; an extern runs a kernel of a library."""

    INPUT = "input"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    VIEW = "view"
    EXTERN = "extern"
    PART = "one of several outputs of an extern"


class Wish(Enum):
    """What checkpointing says of a forward value."""

    NONE = "no region: the cut decides"
    SAVE = "the policy keeps it"
    RECOMPUTE = "computed again in backward"


@dataclass(frozen=True, slots=True)
class Product:
    """m x k times k x n of numbers of this dtype, by the kernel of this name. `rows`: the input that has a row for each
    of the result's, so that pieces of one make pieces of the other; None where tokens are summed over."""

    name: str
    m: int
    n: int
    k: int
    dtype: str
    rows: Value | None


@dataclass(frozen=True, slots=True)
class Extern:
    """A kernel of a library. `run` gets the inputs and, where `planned`, the output that the plan allocated. `product`: what
    it is, where it is a matrix product; `meets`: the tensor-parallel collective that it is, over `ranks`."""

    run: Callable[[Tape, list[Tensor], Tensor | None], tuple[Tensor, ...]]
    planned: bool = False
    product: Product | None = None
    meets: Literal["all_gather", "reduce_scatter"] | None = None
    ranks: int = 1


class Value(ModelTensor):
    """A tensor of the graph. `number` counts values in the order of the trace; `users` are later ones.

    `column`: a reduction over rows; `whole`: one to a single number, which a kernel of its own finishes.
    `recomputable`: pointwise, but the partitioner never computes it again. `random`:
    the same for what draws random numbers. `parameter`: an input that lives anyway, so that saving it is free.
    """

    __slots__ = (
        "aten", "column", "dtype", "extern", "forward", "inputs", "kind", "number", "parameter", "part", "random",
        "recomputable", "requires_grad", "shape", "strides", "users", "whole", "wish",
    )  # fmt: skip

    def __init__(
        self, number: int, kind: Kind, aten: str, inputs: tuple[Value, ...], shape: Shape, dtype: str,
        strides: Strides = None,
    ) -> None:  # fmt: skip
        self.number = number
        self.kind = kind
        self.aten = aten
        self.inputs = inputs
        self.shape = shape
        self.dtype = dtype
        self.strides = strides
        self.users: list[Value] = []
        self.forward = True
        self.requires_grad = False
        self.parameter = False
        self.recomputable = True
        self.random = False
        self.column = False
        self.whole = False
        self.part = 0
        self.wish = Wish.NONE
        self.extern: Extern | None = None
        for value in dict.fromkeys(inputs):
            value.users.append(self)

    def __repr__(self) -> str:
        return f"{self.number}:{self.aten or self.kind.name.lower()}{list(self.shape)}:{self.dtype}"

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def fused(self) -> bool:
        """Is it computed by a generated kernel?"""
        return self.kind in (Kind.POINTWISE, Kind.REDUCTION)

    @property
    def storage(self) -> Value:
        """The value whose bytes this one is a view of, or the value itself."""
        value = self
        while value.kind is Kind.VIEW:
            value = value.inputs[0]
        return value


def ancestors(outputs: list[Value], given: set[Value]) -> list[Value]:
    """All values that must be computed for `outputs` where `given` are there, in the order of the trace."""
    found: set[Value] = set()
    todo = list(outputs)
    while todo:
        value = todo.pop()
        if value not in found and value not in given:
            found.add(value)
            todo += value.inputs
    return sorted(found, key=lambda value: value.number)
