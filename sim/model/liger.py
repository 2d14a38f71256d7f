"""Liger-Kernel's functions, as models call them."""

from __future__ import annotations

from sim.model.calls import Tensor, call, call_tuple
from sim.model.module import Parameter


def rms_norm(x: Tensor, weight: Parameter) -> Tensor:
    """rms_norm, whose backward writes over the gradient that comes in."""
    return call("liger_rms_norm", x, weight.tensor)


def swiglu(gate: Tensor, value: Tensor) -> Tensor:
    """silu(gate) * value; keeps both, and writes their gradients over them."""
    return call("liger_swiglu", gate, value)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Rotary positions of q and k [B, heads, S, D], in place."""
    return call_tuple("liger_rope", q, k, cos, sin)


def fused_linear_cross_entropy(hidden: Tensor, weight: Parameter, targets: Tensor) -> Tensor:
    """Head and loss in one: hidden [N, H], weight [V, H], targets [N]; gradients are computed on the way."""
    return call("liger_linear_cross_entropy", hidden, weight.tensor, targets)
