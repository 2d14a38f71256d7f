"""Traces a module's forward, and its backward by the chain rule: the joint graph that AOTAutograd hands to its partitioner.

The tracer is the model's interpreter while it runs. Operators are decomposed as Inductor decomposes them as far as the
partition and the fusion see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeVar

from sim.model.calls import Shape
from sim.model.calls import Tensor as ModelTensor
from sim.runtime import strides as st
from sim.runtime.compiled.graph import Extern, Kind, Value, Wish
from sim.runtime.selective import Selective
from sim.runtime.strides import Strides

Rule = TypeVar("Rule", bound=Callable[..., Any])
Gradients = Sequence[Value | None]
UNROLLED = 8
"""Inductor unrolls reductions of so few elements: they fuse like pointwise operators (config.unroll_reductions_threshold)."""


class NotCompilable(Exception):
    """An operator that the tracer does not know; scenarios are checked so that it does not come up."""


class Meta(NamedTuple):
    """An output of an extern."""

    shape: Shape
    dtype: str
    strides: Strides = None


@dataclass(slots=True)
class _Record:
    """One differentiable operator: gradients of its outputs in, those of its inputs out."""

    outputs: tuple[Value, ...]
    inputs: tuple[Value | None, ...]
    backward: Callable[..., Gradients]


class Tracer:
    """Makes values. `checkpointed`: inside a region; `selective`: its policy (None: nothing is kept)."""

    rules: dict[str, Callable[..., Any]] = {}  # noqa: RUF012 (filled by the rules' modules)

    def __init__(
        self, autocast_dtype: str | None, checkpointed: bool, selective: Selective | None, float8: str | None = None,
        asynchronous: bool = False,
    ) -> None:  # fmt: skip
        self.autocast_dtype = autocast_dtype
        self.float8 = float8
        """Recipe of the linear layers' products: tensorwise or rowwise scales; None: 16 bit."""
        self.asynchronous = asynchronous
        """Tensor-parallel collectives go on piece by piece beside products."""
        self.checkpointed = checkpointed
        self.selective = selective
        self.values: list[Value] = []
        self.casts: dict[tuple[Value, str], Value] = {}
        """Casts under autocast, and copies that backward makes once."""
        self.scaled: dict[Value, tuple[Value, str]] = {}
        """Values that arrive in 8 bit: their scale, and the dtype that they stand for."""
        self._records: list[_Record] = []
        self._differentiating = False

    # -- interpreter -------------------------------------------------------------------------------------------
    def enter(self, path: str) -> int:
        return 0

    def leave(self, token: int) -> None:
        pass

    def run_repeated(self, module: Any, arguments: tuple[Any, ...]) -> Any:
        return module.forward(*arguments)

    def enable_grad(self) -> AbstractContextManager[None]:
        return nullcontext()

    def computing_loss(self, *logits: ModelTensor) -> AbstractContextManager[None]:
        return nullcontext()

    # -- values ------------------------------------------------------------------------------------------------
    def _value(
        self, kind: Kind, aten: str, inputs: tuple[Value, ...], shape: Shape, dtype: str, strides: Strides = None
    ) -> Value:
        value = Value(len(self.values), kind, aten, inputs, shape, dtype, strides)
        value.forward = not self._differentiating
        if self.checkpointed and value.forward and kind is not Kind.INPUT:
            keeps = bool(aten) and self.selective is not None and self.selective.keeps(aten)
            value.wish = Wish.SAVE if keeps else Wish.RECOMPUTE
        self.values.append(value)
        return value

    def input(self, shape: Shape, dtype: str, strides: Strides = None) -> Value:
        return self._value(Kind.INPUT, "", (), shape, dtype, strides)

    def pointwise(self, aten: str, *inputs: Value, dtype: str = "", shape: Shape | None = None) -> Value:
        """Elementwise over `shape` (default: the first input's), in the order of the first input of that shape."""
        shape = inputs[0].shape if shape is None else shape
        same = (x for x in inputs if x.shape == shape and x.strides is not None)
        strides = next((st.follow(shape, x.strides) for x in same), None)
        return self._value(Kind.POINTWISE, aten, inputs, shape, dtype or inputs[0].dtype, strides)

    def reduction(self, aten: str, x: Value, shape: Shape, dtype: str = "", column: bool = False) -> Value:
        """x summed (or averaged) to `shape`; `column`: over rows."""
        kind = Kind.POINTWISE if x.elements <= UNROLLED * prod(shape) else Kind.REDUCTION
        value = self._value(kind, aten, (x,), shape, dtype or x.dtype)
        value.whole = prod(shape) == 1 and kind is Kind.REDUCTION
        value.column = column and not value.whole and kind is Kind.REDUCTION
        return value

    def view(self, x: Value, shape: Shape, strides: Strides, dtype: str = "") -> Value:
        return self._value(Kind.VIEW, "", (x,), shape, dtype or x.dtype, strides)

    def extern(self, aten: str, inputs: tuple[Value, ...], extern: Extern, *metas: Meta) -> tuple[Value, ...]:
        """The outputs of a library's kernel."""
        whole = self._value(Kind.EXTERN, aten, inputs, *metas[0])
        whole.extern = extern
        if len(metas) == 1:
            return (whole,)
        wish, parts = whole.wish, []
        for number, meta in enumerate(metas):
            part = self._value(Kind.PART, "", (whole,), *meta)
            part.part, part.wish = number, wish
            parts.append(part)
        return tuple(parts)

    # -- gradients ---------------------------------------------------------------------------------------------
    def record(
        self, outputs: Value | tuple[Value, ...], inputs: tuple[Value | None, ...], backward: Callable[..., Gradients]
    ) -> None:
        """`backward` gets the gradients of the outputs and gives those of the inputs (None: not differentiable)."""
        if self._differentiating or not any(x is not None and x.requires_grad for x in inputs):
            return
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        for value in several:
            value.requires_grad = True
        self._records.append(_Record(several, inputs, backward))

    def differentiate(self, output: Value, tangent: Value) -> dict[Value, Value]:
        """Gradients by value, in the order of autograd's engine: the operator that ran last comes first."""
        self._differentiating = True
        gradients: dict[Value, Value] = {output: tangent}
        for record in reversed(self._records):
            incoming = [gradients.pop(value, None) for value in record.outputs]
            if all(gradient is None for gradient in incoming):
                continue
            for x, gradient in zip(record.inputs, record.backward(*incoming)):
                if x is None or gradient is None or not x.requires_grad:
                    continue
                gradient = self._fit(gradient, x)
                known = gradients.get(x)
                gradients[x] = gradient if known is None else self.pointwise("aten.add", known, gradient)
        return gradients

    def _fit(self, gradient: Value, x: Value) -> Value:
        """Summed to the input's shape and cast to its dtype; 8 bit is how numbers are sent, no dtype of gradients."""
        if gradient.shape != x.shape:
            gradient = self.reduction("aten.sum", gradient, x.shape, column=True)
        return gradient if "fp8" in (x.dtype, gradient.dtype) else self.convert(gradient, x.dtype)

    def convert(self, x: Value, dtype: str) -> Value:
        """x in another dtype; no graph of its own."""
        return x if x.dtype == dtype else self.pointwise("aten._to_copy", x, dtype=dtype)


def rule(name: str) -> Callable[[Rule], Rule]:
    """Register the function that traces calls of `name`."""

    def register(function: Rule) -> Rule:
        Tracer.rules[name] = function
        return function

    return register
