"""Megatron's SwiGLU that keeps its input in 8 bit until backward, which casts it back (activation_func_fp8_input_store).

Source: megatron-core 0.16.1, fusions/fused_bias_swiglu.py, SwiGLUFunction and WeightedSwiGLUFunction; read there, no
recording. The cast is input.to(float8_e4m3fn), without a scale.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


class StoredSwiGlu(Op):
    """silu(gate) * value of x [..., 2 F]. Outputs: the result, x in 8 bit, which is all that is saved."""

    node = "SwiGLUFunctionBackward"
    saves_late = True
    saved_outputs = (1,)
    not_differentiable = (1,)

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> tuple[Tensor, ...]:
        stored = tape.cast_copy(x, "fp8")
        return tape.pointwise("swiglu", (*x.shape[:-1], x.shape[-1] // 2), x.dtype, None, x.bytes), stored

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        x = tape.cast_copy(saved[0], node.metas[0][1])
        dx = tape.pointwise("swiglu_back", x.shape, x.dtype, None, x.bytes + first(gradients).bytes)
        gradients.clear()
        return [dx]


class StoredWeightedSwiGlu(Op):
    """The same times the tokens' weights [N, 1], which are saved too."""

    node = "WeightedSwiGLUFunctionBackward"
    saves_late = True
    saved_outputs = (1,)
    not_differentiable = (1,)

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, weights: Tensor) -> Iterable[Tensor | None]:
        return (weights,)

    @staticmethod
    def forward(tape: Tape, x: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        stored = tape.cast_copy(x, "fp8")
        shape, read = (x.shape[0], x.shape[1] // 2), x.bytes + weights.bytes
        return tape.pointwise("weighted_swiglu", shape, x.dtype, None, read), stored

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        weights, stored = saved
        x = tape.cast_copy(stored, node.metas[0][1])
        dx = tape.pointwise("weighted_swiglu_back", x.shape, x.dtype, None, x.bytes + first(gradients).bytes)
        dweights = tape.empty(weights.shape, weights.dtype)
        gradients.clear()
        return [dx, dweights]


@rule("stored_swiglu")
def stored_swiglu(tape: Tape, x: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return tape.apply_tuple(StoredSwiGlu, (x,))[0]
    return tape.apply_tuple(StoredWeightedSwiGlu, (x, weights))[0]
