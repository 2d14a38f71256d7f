"""What T5 computes on positions and ids, operator by operator, with the temporaries that Python lets go (5.24).

Q queries, K keys; nothing here needs a gradient.
"""

from __future__ import annotations

from sim.model import functional as F
from sim.model.calls import Tensor


def arange(length: int) -> Tensor:
    return F.compute("arange", (length,), "int64")


def shifted_positions(length: int) -> Tensor:
    """torch.arange(length) + an offset."""
    positions = arange(length)
    return F.compute("add", (length,), "int64", positions)


def distance_buckets(relative: Tensor, bidirectional: bool) -> Tensor:
    """_relative_position_bucket of distances [Q, K]: exact for near tokens, logarithmic for far ones."""
    shape = relative.shape
    total: Tensor | None = None
    if bidirectional:
        total = F.compute("gt", shape, "bool", relative)
        for name in ("_to_copy", "mul", "add"):
            total = F.compute(name, shape, "int64", total)
        distance = F.compute("abs", shape, "int64", relative)
    else:
        distance = F.compute("zeros_like", shape, "int64")
        distance = F.compute("minimum", shape, "int64", relative, distance)
        distance = F.compute("neg", shape, "int64", distance)
    small = F.compute("lt", shape, "bool", distance)
    far = F.compute("_to_copy", shape, "fp32", distance)
    for name in ("div", "log", "div", "mul"):
        far = F.compute(name, shape, "fp32", far)
    far = F.compute("_to_copy", shape, "int64", far)
    far = F.compute("add", shape, "int64", far)
    limit = F.compute("full_like", shape, "int64")
    far = F.compute("minimum", shape, "int64", far, limit)
    del limit
    chosen = F.compute("where", shape, "int64", small, distance, far)
    if total is None:
        total = F.compute("add", shape, "int64", chosen)
    else:
        F.run_in_place("add_", total)
    return total


def causal_mask(batch: int, length: int, dtype: str) -> Tensor:
    """create_causal_mask for attention that is written out: 0 and the least number, [B, 1, T, T]."""
    sequences, heads = arange(batch), arange(1)
    queries, keys = shifted_positions(length), shifted_positions(length)
    seen = F.compute("le", (length, length), "bool", queries, keys)
    del sequences, heads, queries, keys
    zero = F.compute("zeros", (), dtype)
    least = F.compute("where", (), dtype)
    mask = F.compute("where", (batch, 1, length, length), dtype, seen)
    del zero, least
    return mask


def shift_right(labels: Tensor) -> Tensor:
    """T5's _shift_right: labels behind a start token; what the loss ignores becomes padding."""
    batch, length = labels.shape
    shifted = F.compute("new_zeros", labels.shape, "int64")
    copied = F.compute("clone", (batch, length - 1), "int64", labels)
    F.run_in_place("copy_", copied)
    del copied
    ignored = F.compute("eq", labels.shape, "bool", shifted)
    F.run_in_place("masked_fill_", shifted)
    del ignored
    return shifted
