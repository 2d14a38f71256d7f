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
        return eager_attention(q, k, v, config.dropout, softmax_dtype=softmax_dtype)
    kernel = "math" if config.attention == "math" else "sdpa"
    out = F.attention(q, k, v, dropout_p=config.dropout, kernel=kernel, causal=False)
    return out.transpose(1, 2).contiguous(), None


Attended = Tensor | tuple[Tensor, Tensor]
"""What an attention module gives: its result, with the weights where they exist."""


def with_weights(y: Tensor, weights: Tensor | None) -> Attended:
    return y if weights is None else (y, weights)


def split_weights(attended: Attended) -> tuple[Tensor, Tensor | None]:
    return attended if isinstance(attended, tuple) else (attended, None)


def eager_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float,
    *,
    biases: tuple[Tensor, ...] = (),
    softmax_dtype: str | None = None,
) -> tuple[Tensor, Tensor]:
    """eager_attention_forward: every intermediate result is a tensor of its own. `biases` are added to the scores one by
    one; `softmax_dtype`: softmax in that dtype and cast back (ViT), else in the scores' own."""
    weights = F.matmul(q, k.transpose(2, 3)) * 0.125
    for bias in biases:
        weights = weights + bias
    weights = F.softmax(weights) if softmax_dtype is None else F.softmax(weights, softmax_dtype).to(q.dtype)
    weights = F.dropout(weights, dropout)
    out = F.matmul(weights, v)
    out = out.transpose(1, 2).contiguous()
    return out, weights
