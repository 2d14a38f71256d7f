"""Does offload hide behind compute? A closed form, to be checked against the engine, for a GPT layer in 16 bit.

Letters: s tokens, b sequences, h hidden. A layer keeps 34 sbh bytes without the attention matrix and computes
24 s b h^2 + 4 b s^2 h FLOPs forward (Korthikanti et al. 2022), so b cancels.
"""

from __future__ import annotations

BYTES_PER_SBH = 34


def copy_over_compute(hidden: int, seq_len: int, flops_per_s: float, bytes_per_s: float) -> float:
    """Time to copy what a layer keeps over the time of its forward. Below 1 the copy hides.

    `flops_per_s`: what the layer sustains; `bytes_per_s`: of the copies.
    """
    copy_s = BYTES_PER_SBH / bytes_per_s
    compute_s = (24 * hidden + 4 * seq_len) / flops_per_s
    return copy_s / compute_s


def hides_from(flops_per_s: float, bytes_per_s: float) -> float:
    """The value of 24 h + 4 s from which on the copy hides."""
    return BYTES_PER_SBH * flops_per_s / bytes_per_s
