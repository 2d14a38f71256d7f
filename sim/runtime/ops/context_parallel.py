"""Attention of context-parallel ranks as Transformer Engine runs it for Megatron, on [S, B, heads, D], S local tokens.

Ring (AttnFuncWithCPAndKVP2P): in n steps keys and values of all n ranks pass by, each received while the step before
computes. Its own: causal; of earlier ranks the first half of the keys; of later ranks all keys, for the second half of
the queries. All-gather (AttnFuncWithCPAndKVAllGather): gathered, brought into order, then one kernel per half of the
queries. The rank that is played is the last of its group: it keeps whole partial results in every step, the first one
halves; all compute equally long. TE runs every second kernel on a stream of its own, so that their tails overlap; here
one follows another. Source: Transformer Engine 2.x, context_parallel.py, read there; no recording.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sim.program.kernels import Collective, CollectiveKind
from sim.program.program import COMPUTE, CONTEXT, Owner
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, rule
from sim.runtime.ops.fused_attention import FusedAttention, attend, attend_back
from sim.runtime.ops.ulysses import HeadsAttention
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor

GROUP = "cp"


def exchange(tape: Tape, size_bytes: int, ranks: int, dtype: str) -> int:
    """Every rank sends to the next and receives from the one before, behind what compute was given so far; the event."""
    recorder = tape.recorder
    recorder.stream_waits_stream(CONTEXT, COMPUTE)
    recorder.collective(Collective("ring_exchange", size_bytes, GROUP, ranks, dtype), CONTEXT)
    return recorder.record(CONTEXT)


def half(x: Tensor) -> Tensor:
    """One half of the tokens, a view."""
    return x.alias((x.shape[0] // 2, *x.shape[1:]))


class RingAttention(Op):
    """Saves q, the keys and values that came last, the result, log-sum-exp and the random states of the steps (16 B)."""

    node = "AttnFuncWithCPAndKVP2PBackward"
    saves_late = True
    saved_outputs = (1, 0, 2, 3)
    not_differentiable = (1, 2, 3)

    @staticmethod
    def saved_inputs(node: Node, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Iterable[Tensor | None]:
        return (q,)

    @staticmethod
    def forward(tape: Tape, q: Tensor, k: Tensor, v: Tensor, ranks: int) -> tuple[Tensor, ...]:
        """out, last keys and values, log-sum-exp, random states. All buffers of the ring live until the end."""
        recorder = tape.recorder
        both, value_dim = (k.elements + v.elements,), v.shape[-1]
        buffers = [tape.pointwise("aten::cat", both, k.dtype, None, k.bytes + v.bytes, "copy")]
        arrives: list[int] = []
        states = tape.empty((ranks, 2), "int64")
        partial: list[Tensor] = []
        sums: list[Tensor] = []
        for step in range(ranks):
            if step:
                recorder.wait(COMPUTE, arrives[-1])
            if step < ranks - 1:
                buffers.append(tape.empty(both, k.dtype))
                arrives.append(exchange(tape, buffers[-1].bytes, ranks, k.dtype))
            seen = k if not step else half(k)
            out, lse = attend(tape, q, seen, causal=not step, value_dim=value_dim)[:2]
            partial.append(out)
            sums.append(lse)
            if step == 1:
                total = tape.copy(sums[0])
            if step:
                recorder.memory_bound("flash_attn_fwd_softmax_lse_correction", "elementwise", 3 * lse.bytes)
        moved = partial[0].bytes + 2 * total.bytes
        result = tape.pointwise("flash_attn_fwd_out_correction_init", partial[0].shape, q.dtype, None, moved)
        for _ in partial[1:]:
            recorder.memory_bound("flash_attn_fwd_out_correction", "elementwise", 3 * result.bytes + 2 * total.bytes)
        return result, buffers[-1], total, states

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        """The ring goes back; gradients of keys and values travel with them, added to on arrival."""
        q, last = saved[0], saved[1]
        (ranks,), (keys_shape, values_shape) = node.attributes, (node.metas[1][0], node.metas[2][0])
        recorder, one = tape.recorder, last.elements
        dq = tape.empty(q.shape, q.dtype)
        pairs = [tape.empty((2, one), last.dtype) for _ in range(2)]
        recorder.memory_bound("aten::copy_", "copy", 2 * last.bytes)
        arrived: int | None = None
        made: list[Tensor] = []
        for step in range(ranks):
            if arrived is not None:
                recorder.wait(COMPUTE, arrived)
            ends = step in (0, ranks - 1)  # only keys and values at first, only their gradients at the end
            arrived = exchange(tape, last.bytes * (1 if ends else 2), ranks, last.dtype)
            keys = pairs[step % 2].alias(keys_shape)
            own = step == ranks - 1
            made.clear()
            made.extend(attend_back(tape, q, keys if own else half(keys), own, values_shape[-1]))
            add_to(tape, made[0], step)
            recorder.wait(COMPUTE, arrived)
            add_to(tape, made[1], step)
            add_to(tape, made[2], step)
        made.clear()
        both = pairs[ranks % 2]
        gradients.clear()
        return [dq, both.alias(keys_shape), both.alias(values_shape)]


class GatheredAttention(Op):
    """Saves q, k, v, and per half of the queries result, log-sum-exp and random state; out is one more tensor."""

    node = "AttnFuncWithCPAndKVAllGatherBackward"
    saves_late = True
    saved_outputs = (1, 2, 3, 4, 5, 6)
    not_differentiable = (1, 2, 3, 4, 5, 6)

    @staticmethod
    def saved_inputs(node: Node, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Iterable[Tensor | None]:
        return (q, k, v)

    @staticmethod
    def forward(tape: Tape, q: Tensor, k: Tensor, v: Tensor, ranks: int) -> tuple[Tensor, ...]:
        """out; results, log-sum-exps and random states of both halves."""
        keys, _values = gathered(tape, k, v, ranks)
        result = tape.empty((*q.shape[:3], v.shape[-1]), q.dtype)
        made = []
        for seen in seen_keys(keys, ranks):
            made.append(attend(tape, half(q), seen, True, v.shape[-1], seen.shape[0] - q.shape[0] // 2))
            tape.recorder.memory_bound("aten::copy_", "copy", result.bytes)
        (first, first_sum, first_state), (second, second_sum, second_state) = made
        return result, first, second, first_sum, second_sum, first_state, second_state

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        q, k, v = saved[:3]
        (ranks,) = node.attributes
        dq = tape.empty(q.shape, q.dtype)
        shapes = [(x.shape[0] * ranks, *x.shape[1:]) for x in (k, v)]
        dk, dv = (tape.pointwise("aten::zeros", shape, k.dtype, None, 0, "fill") for shape in shapes)
        keys, _values = gathered(tape, k, v, ranks)
        made = []
        for seen in seen_keys(keys, ranks):
            made.append(attend_back(tape, half(q), seen, True, v.shape[-1], seen.shape[0] - q.shape[0] // 2))
            tape.recorder.memory_bound("aten::copy_", "copy", dq.bytes)
            for gradient in made[-1][1:]:
                add_to(tape, gradient, 1)
        dk = in_order(tape, dk)
        dv = in_order(tape, dv)
        whole = [dk, dv]
        del dk, dv, gradient
        result: Gradients = [dq]
        for shape in (k.shape, v.shape):
            result.append(tape.empty(shape, k.dtype))
            block(tape, "reduce_scatter", whole.pop(0), ranks)
        gradients.clear()
        return result


def add_to(tape: Tape, x: Tensor, step: int) -> None:
    """x into the sum of all steps, which the first one begins."""
    name, moved = ("aten::add_", 3) if step else ("aten::copy_", 2)
    tape.recorder.memory_bound(name, "elementwise", moved * x.bytes)


def block(tape: Tape, kind: CollectiveKind, whole: Tensor, ranks: int) -> None:
    """A collective that compute waits for; `whole` is the full buffer."""
    tape.recorder.collective(Collective(kind, whole.bytes, GROUP, ranks, whole.dtype), COMPUTE)


def gathered(tape: Tape, k: Tensor, v: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """All ranks' keys and values, then each in the order of the sequence."""
    both = []
    for x in (k, v):
        both.append(tape.empty((x.shape[0] * ranks, *x.shape[1:]), x.dtype, owner=Owner.GATHERED))
        block(tape, "all_gather", both[-1], ranks)
    both[0] = in_order(tape, both[0])
    both[1] = in_order(tape, both[1])
    return both[0], both[1]


def in_order(tape: Tape, x: Tensor) -> Tensor:
    """torch.index_select of the parts: a copy."""
    return tape.pointwise("aten::index_select", x.shape, x.dtype, None, x.bytes, "copy")


def seen_keys(keys: Tensor, ranks: int) -> list[Tensor]:
    """What the halves of the last rank's queries, parts n - 1 and n of 2 n, see: all up to themselves, as views."""
    part = keys.shape[0] // (2 * ranks)
    return [keys.alias((part * parts, *keys.shape[1:])) for parts in (ranks, ranks + 1)]


KINDS: dict[str, type[Op]] = {"ring": RingAttention, "all-gather": GatheredAttention, "ulysses": HeadsAttention}


@rule("fused_attention")
def fused_attention(tape: Tape, q: Tensor, k: Tensor, v: Tensor, ranks: int, kind: str, window: int) -> Tensor:
    if ranks == 1:
        return tape.apply_tuple(FusedAttention, (q, k, v), window)[0]
    return tape.apply_tuple(KINDS[kind], (q, k, v), ranks)[0]
