"""DeepSpeed-Ulysses around an attention function, as DeepSpeed plugs it into transformers (UlyssesSPAttentionHF).

n ranks hold S/n tokens each, in the order of the sequence. Before attention every rank gets all tokens of its A/n heads,
after it its own tokens of all heads. Of fewer key heads than ranks each is repeated, so that every rank has one.
B sequences, A heads, K key heads, D head dim. Positions are gathered too there, 8 bytes a token, which is left out.
Source: DeepSpeed 0.19, runtime/sequence_parallel/ulysses_sp.py, read there.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.model import functional as F
from sim.model.calls import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [B, A, S, D], k and v [B, K, S, D]: the result [B, S, A, D]."""


def attend_by_heads(q: Tensor, k: Tensor, v: Tensor, ranks: int, attend: Attend) -> Tensor:
    """q [B, A, S/n, D], k and v [B, K, S/n, D]: [B, S/n, A D]. `attend` runs on this rank's heads."""
    q = q.permute(2, 0, 1, 3)
    k = k.permute(2, 0, 1, 3)
    v = v.permute(2, 0, 1, 3)
    whole_q, whole_k, whole_v = (_tokens_for_heads(x, ranks) for x in (q, k, v))
    whole_q = whole_q.permute(1, 2, 0, 3).contiguous()
    whole_k = whole_k.permute(1, 2, 0, 3).contiguous()
    whole_v = whole_v.permute(1, 2, 0, 3).contiguous()
    y = attend(whole_q, whole_k, whole_v).transpose(0, 1)
    return _heads_for_tokens(y.reshape(*y.shape[:2], -1), ranks)


def _tokens_for_heads(x: Tensor, ranks: int) -> Tensor:
    """[S/n, B, heads, D] to [S, B, heads/n, D]."""
    length, batch, heads, width = x.shape
    if heads < ranks:
        x = repeat_heads(x, ranks // heads)
    x = x.reshape(length, batch, ranks, -1, width).permute(2, 0, 1, 3, 4).contiguous()
    y = F.exchange_parts(x, ranks)
    return y.reshape(ranks * length, *y.shape[2:]).contiguous()


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """x.repeat_interleave(times, dim=2): a copy."""
    length, batch, heads, width = x.shape
    copied = F.clone(x.unsqueeze(3).expand(length, batch, heads, times, width))
    return copied.view(length, batch, heads * times, width)


def _heads_for_tokens(x: Tensor, ranks: int) -> Tensor:
    """[S, B, A/n D] to [B, S/n, A D]."""
    length, batch, width = x.shape
    x = x.reshape(ranks, length // ranks, batch, width).contiguous()
    y = F.exchange_parts(x, ranks).permute(1, 2, 0, 3)
    y = y.reshape(*y.shape[:2], -1).contiguous().transpose(0, 1)
    return y.reshape(*y.shape[:2], -1)
