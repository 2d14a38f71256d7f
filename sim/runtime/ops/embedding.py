"""Embedding: rows of the weight forward; backward sorts the indices and sums per segment (Embedding.cu).

Sources: TAPE.md 4, TAPE_LLAMA_FSDP.md 0.4; few or narrow rows probed with torch 2.14 (132 multiprocessors). Sizes use
upper bounds, so they do not depend on the indices' values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sim.model.calls import Shape
from sim.program.kernels import ITEM_BYTES
from sim.program.program import Owner
from sim.runtime import scratch
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor

DIRECT_INDICES = 3072  # up to here one kernel without a sort


class Embedding(Op):
    """Saves the indices. Expanded ones are copied for the kernels (recorded, torch 2.14)."""

    node = "EmbeddingBackward0"
    aten = "aten.embedding"

    @staticmethod
    def saved_inputs(node: Node, weight: Tensor, indices: Tensor) -> Iterable[Tensor | None]:
        return (indices,)

    @staticmethod
    def forward(tape: Tape, weight: Tensor, indices: Tensor) -> Tensor:
        shape = (*indices.shape, weight.shape[1])
        moved = indices.elements * weight.shape[1] * ITEM_BYTES[weight.dtype] + indices.bytes
        if indices.strides is not None:
            indices = tape.copy(indices)
        return tape.pointwise("aten::embedding", shape, weight.dtype, None, moved, "embedding")

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        shape, dtype = node.metas[0]
        gradient = first(gradients)
        plain = tape.copy(saved[0]) if saved[0].strides is not None else None  # until the gradient is there
        if gradient.strides is not None:
            gradient = tape.copy(gradient)
        if saved[0].elements <= DIRECT_INDICES:
            return [
                tape.pointwise("aten::embedding_dense_backward", shape, dtype, None, gradient.bytes, "embedding"),
                None,
            ]
        weight_gradient = _sorted_gradient(tape, shape, dtype, saved[0].elements, gradient)
        del plain
        return [weight_gradient, None]


def _sorted_gradient(tape: Tape, shape: Shape, dtype: str, count: int, gradient: Tensor) -> Tensor:
    """Sort, then partial sums per segment in fp32. All but the returned gradient dies in the end."""

    def buffer(elements: int, item: str = "int64") -> Tensor:
        return tape.empty((elements,), item, owner=Owner.WORKSPACE)

    vocab, width = shape
    recorder = tape.recorder
    sorted_, original = buffer(count), buffer(count)
    positions = buffer(count)
    temporary = buffer(scratch.cub_radix_sort(count, vocab), "uint8")
    recorder.memory_bound("cub::DeviceRadixSort", "sort", 8 * count * 8)
    del temporary, positions
    result = tape.empty(shape, dtype)
    recorder.memory_bound("aten::zeros", "fill", result.bytes)
    segments, number = buffer(count), buffer(1)
    dummy = buffer(count)
    temporary = buffer(scratch.cub_unique(count), "uint8")
    recorder.memory_bound("cub::DeviceSelect", "sort", 8 * count * 4)
    del temporary, dummy
    bound = min(count, vocab)
    partials_per, offsets_per = buffer(bound), buffer(bound)
    temporary = buffer(scratch.cub_scan(bound), "uint8")
    recorder.memory_bound("cub::DeviceScan", "sort", 8 * bound * 3)
    del temporary
    parts = count // 10 + bound
    total, offsets = buffer(1), buffer(parts)
    if bound < 4 * tape.device.sms and parts > 4 * bound:  # few rows, each of many indices: summed row by row
        sums = [buffer(parts)]
        if dtype != "fp32":
            sums.append(tape.empty((bound, width), "fp32", owner=Owner.WORKSPACE))
    else:
        sums = [tape.empty((parts, width), "fp32", owner=Owner.WORKSPACE)]
    recorder.memory_bound("aten::embedding_dense_backward", "embedding", 2 * gradient.bytes)
    del sums, offsets, total, offsets_per, partials_per, number, segments, original, sorted_
    return result


@rule("embedding")
def embedding(tape: Tape, indices: Tensor, weight: Tensor) -> Tensor:
    return tape.apply(Embedding, (weight, indices))
