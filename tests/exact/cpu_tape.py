"""What the probes' networks need of a CPU's tape besides its own rules: attention written out, and a count of the operators
that run again, views among them, as a dispatch mode sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sim.program.program import PHASE_SHIFT, Phase
from sim.runtime.autograd import Gradients, Node, SavedTensor
from sim.runtime.cpu import CpuRecorder, CpuTape
from sim.runtime.ops.base import Op, first
from sim.runtime.ops.matmul import Bmm
from sim.runtime.ops.views import Expand, UnsafeView, reshape
from sim.runtime.tensor import Tensor

DROPOUT_OPERATORS = 3  # empty_like, bernoulli_, div_ beside the product
MASK_OPERATORS = 3  # ones, tril, view


class CountingTape(CpuTape):
    def __init__(self, recorder: CpuRecorder) -> None:
        super().__init__(recorder)
        self.operators_again = 0

    def count(self, operators: int = 1) -> None:
        if self.grad_enabled and self.recorder.base >> PHASE_SHIFT == Phase.RECOMPUTE:
            self.operators_again += operators

    def run_forward(self, op: type[Op], inputs: tuple[Tensor | None, ...], attributes: tuple[Any, ...]) -> Any:
        self.count()
        return super().run_forward(op, inputs, attributes)

    def _apply(self, op: type[Op], inputs: tuple[Tensor | None, ...], attributes: tuple[Any, ...]) -> Any:
        """A saved output that has a gradient is detached, which a dispatch mode sees where no hook packs it."""
        if self.records(inputs) and not self.hooks:
            self.count(len(set(op.saved_outputs) - set(op.not_differentiable)))
        return super()._apply(op, inputs, attributes)


class _DivByNumber(Op):
    """x / number; the number is a tensor of 8 bytes, which is saved apart from all hooks (saved_variable.cpp)."""

    node = "DivBackward0"
    aten = "aten.div"

    @staticmethod
    def forward(tape: CpuTape, x: Tensor) -> Tensor:
        return tape.pointwise("aten::div", x.shape, x.dtype, None, x.bytes)

    @staticmethod
    def backward(tape: CpuTape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [tape.pointwise("aten::div", *node.metas[0], None, first(gradients).bytes)]


class _MaskedFill(Op):
    """Saves the mask."""

    node = "MaskedFillBackward0"
    aten = "aten.masked_fill"

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, mask: Tensor) -> Iterable[Tensor | None]:
        return (mask,)

    @staticmethod
    def forward(tape: CpuTape, x: Tensor, mask: Tensor) -> Tensor:
        return tape.pointwise("aten::masked_fill", x.shape, x.dtype, None, x.bytes)

    @staticmethod
    def backward(tape: CpuTape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [tape.pointwise("aten::masked_fill", *node.metas[0], None, first(gradients).bytes), None]


def _counted(name: str, operators: int) -> Callable[..., Tensor]:
    """The CPU's rule, which runs so many operators besides."""

    def rule(tape: CountingTape, *arguments: Any) -> Tensor:
        tape.count(operators)
        result: Tensor = CpuTape.rules[name](tape, *arguments)
        return result

    return rule


def _matmul(tape: CountingTape, a: Tensor, b: Tensor) -> Tensor:
    """torch.matmul of four dimensions: both operands expanded and folded, then bmm."""
    (batch, heads, m, k), n = a.shape, b.shape[3]
    left = reshape(tape, tape.apply(Expand, (a,), a.shape), (batch * heads, m, k))
    right = reshape(tape, tape.apply(Expand, (b,), b.shape), (batch * heads, k, n))
    return tape.apply(UnsafeView, (tape.apply(Bmm, (left, right)),), (batch, heads, m, n), None)


def _div(tape: CountingTape, x: Tensor) -> Tensor:
    number = tape.empty((), "int64")
    out = tape.apply(_DivByNumber, (x,))
    if out.node is not None:
        hooks, tape.hooks = tape.hooks, []
        out.node.saved.append(SavedTensor(tape, number))
        tape.hooks = hooks
    return out


def _hide(tape: CountingTape, x: Tensor, mask: Tensor) -> Tensor:
    """x.masked_fill(~mask, -inf)."""
    tape.count()
    tape.reads((mask,))
    hidden = tape.pointwise("aten::bitwise_not", mask.shape, "bool", None, mask.bytes)
    return tape.apply(_MaskedFill, (x, hidden))


def _causal_mask(tape: CountingTape, length: int) -> Tensor:
    """tril(ones(n, n)) as bool, seen as [1, 1, n, n]."""
    ones = tape.empty((length, length), "bool")
    mask = tape.empty((length, length), "bool")
    del ones
    tape.count(MASK_OPERATORS)
    return mask.alias((1, 1, length, length))


CountingTape.rules = CpuTape.rules | {
    "dropout": _counted("dropout", DROPOUT_OPERATORS), "matmul": _matmul, "div": _div, "causal_mask": _causal_mask,
    "hide": _hide,
}  # fmt: skip
