"""Context parallelism: ranks that share the tokens of a sequence, in attention too, where each needs the others' keys.

Rank r of n holds the parts r and 2 n - 1 - r of 2 n equal parts of the sequence (Megatron's and torch's load balancing
of a causal mask), so that all ranks have equally much to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ContextKind = Literal["ring", "all-gather", "ulysses"]


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """`degree` ranks share a sequence. Keys and values go round in a ring, each step beside the attention of the one
    before, or are gathered whole before attention begins; or ranks exchange tokens for heads (ulysses)."""

    degree: int = 1
    kind: ContextKind = "ring"
