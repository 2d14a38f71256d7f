"""What Megatron writes op by op around experts with biases and clamped activations (GPT-OSS).

Source: megatron-core, transformer/moe/experts.py (_apply_bias) and fusions/fused_bias_geglu.py, read there; no recording.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sim.model.experts import Groups
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.pointwise import promote
from sim.runtime.tape import Tape, strides_like
from sim.runtime.tensor import Tensor


class AddExpertBiases(Op):
    """cat(part + bias * weights for every expert).to(x.dtype): x [N, H], a bias [H] per expert, weights [N, 1] of tokens.

    Sums are as wide as the weights (fp32 router: fp32). Saves the weights; backward has the same passes and their sums.
    """

    node = "AddExpertBiasesBackward"

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, weights: Tensor, *biases: Tensor) -> Iterable[Tensor | None]:
        return (weights, *biases)

    @staticmethod
    def forward(tape: Tape, x: Tensor, weights: Tensor, *arguments: Any) -> Tensor:
        *_, groups = arguments
        wide, width, parts = promote(x.dtype, weights.dtype), x.shape[1], []
        for rows in rows_of_each(groups):
            read = rows * x.bytes // x.shape[0]
            scaled = tape.pointwise("aten::mul", (rows, width), wide, None, 0)
            parts.append(tape.pointwise("aten::add", (rows, width), wide, None, read + scaled.bytes))
            del scaled
        joined = tape.pointwise("aten::cat", x.shape, wide, None, sum(part.bytes for part in parts), "copy")
        del parts
        return tape.cast_copy(joined, x.dtype) if wide != x.dtype else joined

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        weights, *biases = saved
        (groups,), (shape, dtype) = node.attributes, node.metas[0]
        wide, width = promote(dtype, weights.dtype), shape[1]
        gradient = tape.cast_copy(first(gradients), wide) if wide != dtype else first(gradients)
        of_biases, parts = list[Tensor | None](), []
        for number, rows in enumerate(rows_of_each(groups)):
            part_bytes = rows * gradient.bytes // shape[0]
            if wide != dtype:
                parts.append(tape.pointwise("aten::copy_", (rows, width), dtype, None, part_bytes))
            _reduced(tape, (rows, width), wide, part_bytes, (rows, 1))  # of the weights
            _reduced(tape, (rows, width), wide, part_bytes, (width,))
            of_biases.append(tape.empty((width,), biases[number].dtype) if node.needs(2 + number) else None)
        whole = tape.pointwise("aten::cat", shape, dtype, None, first(gradients).bytes, "copy")
        del parts
        return [whole, tape.empty(weights.shape, weights.dtype), *of_biases]


def _reduced(tape: Tape, shape: tuple[int, int], dtype: str, read_bytes: int, result: tuple[int, ...]) -> None:
    """The gradient times the other factor, summed to the factor's shape."""
    product = tape.pointwise("aten::mul", shape, dtype, None, read_bytes)
    tape.pointwise("aten::sum", result, dtype, None, product.bytes, "reduce")


def rows_of_each(groups: Groups) -> list[int]:
    """Tokens of every expert of the rank, one by one."""
    return [rows for count, rows in groups for _ in range(count)]


class Clamp(Op):
    """torch.clamp; saves its input, which backward compares again."""

    node = "ClampBackward1"
    aten = "aten.clamp"

    @staticmethod
    def saved_inputs(node: Node, x: Tensor) -> Iterable[Tensor | None]:
        return (x,)

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        return tape.pointwise("aten::clamp", x.shape, x.dtype, strides_like(x), x.bytes)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        (x,), gradient = saved, first(gradients)
        return [tape.pointwise("aten::where", x.shape, x.dtype, None, gradient.bytes + x.bytes)]


@rule("add_expert_biases")
def add_expert_biases(tape: Tape, x: Tensor, biases: tuple[Tensor, ...], weights: Tensor, groups: Groups) -> Tensor:
    return tape.apply(AddExpertBiases, (x, weights, *biases), groups)


@rule("clamp")
def clamp(tape: Tape, x: Tensor) -> Tensor:
    return tape.apply(Clamp, (x,))
