"""Cross entropy: log_softmax, then nll_loss (TAPE.md 3 and 4; FSDP.md fact 15)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.pointwise import to
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


class LogSoftmax(Op):
    """Saves its result; backward allocates one gradient of that size."""

    node = "LogSoftmaxBackward0"
    aten = "aten._log_softmax"
    saved_outputs = (0,)

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        return tape.pointwise("aten::_log_softmax", x.shape, x.dtype, None, x.bytes, "cross_entropy")

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        name, gradient = "aten::_log_softmax_backward_data", first(gradients)
        read = gradient.bytes + saved[0].bytes
        return [tape.pointwise(name, gradient.shape, gradient.dtype, None, read, "cross_entropy")]


class NllLoss(Op):
    """Two scalars (loss, total weight). Saves the log probabilities, the targets and the total weight."""

    node = "NllLossBackward0"
    aten = "aten.nll_loss_forward"
    saved_outputs = (1,)
    not_differentiable = (1,)

    @staticmethod
    def saved_inputs(node: Node, log_probabilities: Tensor, targets: Tensor) -> Iterable[Tensor | None]:
        return (log_probabilities, targets)

    @staticmethod
    def forward(tape: Tape, log_probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss, total = tape.empty((), log_probabilities.dtype), tape.empty((), log_probabilities.dtype)
        tape.recorder.memory_bound("aten::nll_loss_forward", "reduce", 2 * targets.bytes)
        return loss, total

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        shape, dtype = node.metas[0]
        return [tape.pointwise("aten::nll_loss_backward", shape, dtype, None, 0, "fill"), None]


@rule("cross_entropy")
def cross_entropy(tape: Tape, logits: Tensor, targets: Tensor) -> Tensor:
    """Under autocast log_softmax keeps 16 bit (its dtype is passed explicitly) and nll_loss casts to fp32."""
    log_probabilities = tape.apply(LogSoftmax, (logits,))
    inputs = to(tape, log_probabilities, "fp32") if tape.autocast_dtype else log_probabilities  # both live to the end
    return tape.apply_tuple(NllLoss, (inputs, targets))[0]
