"""torch.distributed's context_parallel: scaled_dot_product_attention over ranks that share sequences (torchtitan).

Line by line as `_templated_ring_attention` and its backward in torch/distributed/tensor/experimental run them on the last
rank of the group, since Python's variables decide what lives how long: keys and values of one rank after another are
passed around ("ring": rotate method alltoall) or cut out of one gathered buffer ("all-gather"), partial results are
merged in fp32, and gradients of keys and values go around in fp32. Own keys causal, of others the first half: the load is
balanced. Recorded with torch 2.14 (tests/exact/recordings/context); the first step's random state is what autograd keeps.
"""

from __future__ import annotations

from typing import Any

from sim.model.shard.context import ContextKind
from sim.program.kernels import Collective
from sim.program.program import COMPUTE, CONTEXT
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first
from sim.runtime.ops.context_parallel import GROUP, exchange
from sim.runtime.ops.flash import Flash, flash_backward
from sim.runtime.strides import plain
from sim.runtime.tape import Tape, strides_like
from sim.runtime.tensor import Tensor


class _Rotater:
    """Passes buffers to the next rank, or gathers those of all ranks once and hands out one after another."""

    def __init__(self, tape: Tape, ranks: int, kind: ContextKind) -> None:
        self.tape = tape
        self.ranks = ranks
        self.gathers = kind == "all-gather"
        self.buffer: Tensor | None = None
        self.event: int | None = None

    def exchange(self, mine: Tensor) -> None:
        """Asynchronously, behind what compute was given so far."""
        tape = self.tape
        if not self.gathers:
            self.buffer = tape.empty(mine.shape, mine.dtype)
            self.event = exchange(tape, mine.bytes, self.ranks, mine.dtype)
        elif self.buffer is None:
            self.buffer = tape.empty((self.ranks * mine.elements,), mine.dtype)
            tape.recorder.stream_waits_stream(CONTEXT, COMPUTE)
            work = Collective("all_gather", self.buffer.bytes, GROUP, self.ranks, mine.dtype)
            tape.recorder.collective(work, CONTEXT)
            self.event = tape.recorder.record(CONTEXT)

    def next_buffer(self) -> Tensor:
        """What has come; compute waits for it."""
        assert self.buffer is not None
        if self.event is not None:
            self.tape.recorder.wait(COMPUTE, self.event)
            self.event = None
        return self.buffer.detach()


class RingFlash(Op):
    """Saves what flash attention saves: local k, q, v, then the merged log-sum-exp and result, and a random state."""

    node = "ScaledDotProductFlashAttentionBackward0"
    aten = "aten._scaled_dot_product_flash_attention"
    saved_outputs = Flash.saved_outputs
    not_differentiable = Flash.not_differentiable
    saved_inputs = Flash.saved_inputs

    @staticmethod
    def forward(tape: Tape, q: Tensor, k: Tensor, v: Tensor, *attributes: Any) -> tuple[Tensor, ...]:
        """`attributes`: probability of dropout, ranks, ContextKind."""
        dropout_p, ranks, kind = attributes
        key = _contiguous(tape, k)
        value = _contiguous(tape, v)
        rotater = _Rotater(tape, ranks, kind)
        merged: list[Tensor] = []
        kept: list[Tensor] = []
        for step in range(ranks):
            if step:
                next_kv = rotater.next_buffer()
                key, value = _two(next_kv, key, value)
            if step < ranks - 1:
                next_kv = _joined(tape, key, value)
                rotater.exchange(next_kv)
                del next_kv
            seen, values = (_half(key), _half(value)) if step else (key, value)
            out, lse, *rest = Flash.forward(tape, q, seen, values, dropout_p, not step)
            kept = kept or rest
            _merge(tape, merged, out, lse)
        return tape.cast_copy(merged[0], q.dtype), merged[1], *kept

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        k, q, v, _lse, out = saved[:5]
        _, ranks, kind = node.attributes
        return [*ring_backward(tape, first(gradients), (q, k, v), out, ranks, kind)]


def ring_backward(
    tape: Tape, gradient: Tensor, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, ranks: int, kind: ContextKind
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    q, k, v = qkv
    recorder = tape.recorder
    dq, dk, dv = (tape.pointwise("aten::zeros_like", x.shape, "fp32", strides_like(x), 0, "fill") for x in (q, k, v))
    key, value = _contiguous(tape, k), _contiguous(tape, v)
    keys, sums = _Rotater(tape, ranks, kind), _Rotater(tape, ranks, "ring")
    for step in range(ranks):
        if step:
            buffer = keys.next_buffer()
            key, value = _two(buffer, key, value)
        if step < ranks - 1:
            next_kv = _joined(tape, key, value)
            keys.exchange(next_kv)
        seen, values = (_half(key), _half(value)) if step else (key, value)
        made = flash_backward(tape, gradient, q, seen, values, out, causal=not step)
        if step:
            next_sums = sums.next_buffer()
            dk, dv = _two(next_sums, dk, dv)
            dk = _updated(tape, dk, made[1])
            dv = _updated(tape, dv, made[2])
        else:
            for total, part in ((dk, made[1]), (dv, made[2])):
                recorder.memory_bound("aten::add_", "elementwise", 2 * total.bytes + part.bytes)
            del total, part
        next_sums = _joined(tape, dk, dv)
        sums.exchange(next_sums)
        recorder.memory_bound("aten::add_", "elementwise", 2 * dq.bytes + made[0].bytes)
    dq = tape.cast_copy(dq, q.dtype)
    next_sums = tape.cast_copy(sums.next_buffer(), k.dtype)
    dk, dv = _two(next_sums, dk, dv)
    return dq, dk, dv


def _contiguous(tape: Tape, x: Tensor) -> Tensor:
    return x if x.strides is None else tape.copy(x)


def _joined(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """torch.cat([a.flatten(), b.flatten()]); what is not in plain order is copied first."""
    flat_a = _contiguous(tape, a)
    flat_b = _contiguous(tape, b)
    return tape.pointwise("aten::cat", (a.elements + b.elements,), a.dtype, None, flat_a.bytes + flat_b.bytes, "copy")


def _two(buffer: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A buffer seen as the two tensors that were joined."""
    return Tensor(buffer.storage, a.shape, buffer.dtype), Tensor(buffer.storage, b.shape, buffer.dtype)


def _half(x: Tensor) -> Tensor:
    """x.chunk(2, dim=2)[0] of [B, heads, S, D]."""
    batch, heads, length, width = x.shape
    return Tensor(x.storage, (batch, heads, length // 2, width), x.dtype, x.strides or plain(x.shape))


def _updated(tape: Tape, total: Tensor, part: Tensor) -> Tensor:
    """_partial_update: the first chunk is added to in place, then the chunks are put together anew."""
    tape.recorder.memory_bound("aten::add_", "elementwise", total.bytes + part.bytes)
    return tape.pointwise("aten::cat", total.shape, total.dtype, None, total.bytes, "copy")


def _merge(tape: Tape, merged: list[Tensor], out: Tensor, lse: Tensor) -> None:
    """_SDPAMerger.step: results in fp32, weighed by their log-sum-exps."""
    block = tape.cast_copy(out, "fp32")
    if not merged:
        merged += [block, lse.detach()]
        return
    order = strides_like(block)
    apart = tape.pointwise("aten::sub", lse.shape, "fp32", None, 2 * lse.bytes)
    gate = tape.pointwise("aten::sigmoid", lse.shape, "fp32", None, lse.bytes)
    del apart
    difference = tape.pointwise("aten::sub", block.shape, "fp32", order, 2 * block.bytes)
    scaled = tape.pointwise("aten::mul", block.shape, "fp32", order, block.bytes + lse.bytes)
    del gate, difference
    result = tape.pointwise("aten::sub", block.shape, "fp32", order, 2 * block.bytes)
    del scaled
    apart = tape.pointwise("aten::sub", lse.shape, "fp32", None, 2 * lse.bytes)
    gate = tape.pointwise("aten::log_sigmoid_forward", lse.shape, "fp32", None, lse.bytes)
    del apart
    merged[1] = tape.pointwise("aten::sub", lse.shape, "fp32", None, 2 * lse.bytes)
    del gate
    merged[0] = result
