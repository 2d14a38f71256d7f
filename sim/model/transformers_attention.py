"""Attention without a causal mask as transformers 5.24 calls it: SDPA, or written out ("eager"; `attention: unfused`).

B batch, S sequence, A heads, D head dim.
"""

from __future__ import annotations

from sim.model import functional as F
from sim.model.calls import Tensor
from sim.model.config import ModelConfig


def attend(
    q: Tensor, k: Tensor, v: Tensor, config: ModelConfig, softmax_dtype: str | None = None
) -> tuple[Tensor, Tensor | None]:
    """All to all over q, k, v [B, A, S, D]: the result [B, S, A, D] in plain order, and the weights where they exist."""
    if config.attention == "unfused":
        return eager_attention(q, k, v, config.dropout, softmax_dtype)
    kernel = "math" if config.attention == "math" else "sdpa"
    out = F.attention(q, k, v, dropout_p=config.dropout, kernel=kernel, causal=False)
    return out.transpose(1, 2).contiguous(), None


def eager_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, softmax_dtype: str | None = None
) -> tuple[Tensor, Tensor]:
    """eager_attention_forward: every intermediate result is a tensor of its own. `softmax_dtype`: softmax in that dtype and
    cast back (ViT), else in the scores' own."""
    weights = F.matmul(q, k.transpose(2, 3)) * 0.125
    weights = F.softmax(weights) if softmax_dtype is None else F.softmax(weights, softmax_dtype).to(q.dtype)
    weights = F.dropout(weights, dropout)
    out = F.matmul(weights, v)
    out = out.transpose(1, 2).contiguous()
    return out, weights
