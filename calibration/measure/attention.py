"""Fused attention, forward and backward, by the kernels that SDPA runs on the device.

    python -m calibration.measure.attention --device cpu --minutes 1

flash2: aten::_flash_attention_forward and _backward; efficient: xFormers' kernel; on a CPU its own flash kernel stands
for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from calibration.measure.case import DESIGN, Case
from calibration.measure.command import main
from calibration.measure.device import Device
from calibration.measure.needs_torch import torch
from calibration.measure.operands import Operands, rotated
from calibration.measure.timing import Call
from sim.program.kernels import Attention

FAMILY = "attention"
GENERATIONS = ("flash2", "efficient")
NAMES = {"flash2": "aten::_flash_attention", "efficient": "aten::_efficient_attention"}
CUDA_SHAPES = (
    (1, 32, 32, 8192),
    (1, 32, 8, 8192),
    (4, 16, 16, 2048),
    (8, 32, 32, 1024),
    (16, 12, 12, 512),
    (1, 32, 32, 32_768),
)
CPU_SHAPES = ((1, 8, 8, 1024), (2, 8, 8, 512), (4, 4, 4, 256), (8, 8, 8, 128), (1, 8, 2, 512))
"""Sequences, heads, key/value heads, tokens per sequence."""
HEAD_DIMS = (64, 128)
aten = torch.ops.aten


def case(work: Attention, name: str = "", origin: str = DESIGN) -> Case:
    """One kernel; its name as the program calls it."""
    name = name or f"{NAMES[work.generation]}_{'backward' if work.backward else 'forward'}"

    def build(device: Device) -> Call:
        o = Operands(device, work.dtype)
        forward, backward = kernels(device, work)
        if not work.backward:
            return rotated(device, lambda: heads(o, work), forward)

        def saved() -> Sequence[Any]:
            q, k, v = heads(o, work)
            return torch.randn_like(q), q, k, v, *forward(q, k, v)

        return rotated(device, saved, backward)

    return Case(FAMILY, work, build, name, origin=origin, bytes_needed=work.bytes)


def heads(o: Operands, work: Attention) -> Sequence[Any]:
    """q [B, A, Sq, D], k and v [B, Akv, Sk, D], views of token-major memory as a model's projections leave them."""

    def head_major(count: int, length: int, width: int) -> Any:
        return o.random(work.batch, length, count, width).transpose(1, 2)

    value_dim = work.value_head_dim or work.head_dim
    q = head_major(work.heads, work.q_len, work.head_dim)
    k = head_major(work.kv_heads, work.kv_len, work.head_dim)
    return q, k, head_major(work.kv_heads, work.kv_len, value_dim)


def kernels(device: Device, work: Attention) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward (q, k, v -> what backward needs), backward (gradient, q, k, v, that)."""
    if device.name == "cpu":
        return cpu_kernels(work)
    return efficient_kernels(work) if work.generation == "efficient" else flash_kernels(work)


def cpu_kernels(work: Attention) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Shares of key/value heads are written out, as SDPA does on a CPU."""
    times = work.heads // work.kv_heads

    def forward(q: Any, k: Any, v: Any) -> Any:
        k, v = (x.repeat_interleave(times, 1) if times > 1 else x for x in (k, v))
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, work.causal)

    def backward(gradient: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> Any:
        k, v = (x.repeat_interleave(times, 1) if times > 1 else x for x in (k, v))
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, work.causal
        )  # fmt: skip

    return forward, backward


def flash_kernels(work: Attention) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """PyTorch's own FlashAttention-2, by the operators that autograd calls; it shares key/value heads itself."""

    def forward(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, rng, unused, _ = aten._flash_attention_forward(
            q, k, v, None, None, work.q_len, work.kv_len, 0.0, work.causal, False
        )
        return out, lse, rng, unused

    def backward(gradient: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, rng: Any, unused: Any) -> Any:
        gradient, q, k, v = (x.transpose(1, 2) for x in (gradient, q, k, v))
        return aten._flash_attention_backward(
            gradient, q, k, v, out, lse, None, None, work.q_len, work.kv_len, 0.0, work.causal, rng, unused
        )

    return forward, backward


def efficient_kernels(work: Attention) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """xFormers' kernel, which has no shared key/value heads: they are written out before."""
    times = work.heads // work.kv_heads

    def forward(q: Any, k: Any, v: Any) -> Any:
        k, v = (x.repeat_interleave(times, 1) if times > 1 else x for x in (k, v))
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, work.causal)

    def backward(gradient: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, seed: Any, offset: Any) -> Any:
        k, v = (x.repeat_interleave(times, 1) if times > 1 else x for x in (k, v))
        return aten._scaled_dot_product_efficient_attention_backward(
            gradient, q, k, v, None, out, lse, seed, offset, 0.0, [True, True, True, False], work.causal
        )

    return forward, backward


def cases(device: Device) -> Iterator[Case]:
    """The covering design: training shapes, causal and not, in 16 bit (fp32 on a CPU)."""
    cpu = device.name == "cpu"
    for head_dim in HEAD_DIMS:
        for batch, count, kv_heads, length in CPU_SHAPES if cpu else CUDA_SHAPES:
            plain = Attention(batch, count, kv_heads, length, length, head_dim, True, False)
            plain = replace(plain, dtype="fp32" if cpu else "bf16")
            for generation in GENERATIONS[: 1 if cpu else None]:
                for causal in (True, False):
                    for backward in (False, True):
                        yield case(replace(plain, generation=generation, causal=causal, backward=backward))


if __name__ == "__main__":
    main(FAMILY)
