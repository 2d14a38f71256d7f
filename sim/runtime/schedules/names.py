"""Schedules by the names that a scenario uses."""

from __future__ import annotations

from collections.abc import Callable

from sim.runtime.schedules.actions import Action
from sim.runtime.schedules.folded import dual_pipe_v, zero_bubble_v
from sim.runtime.schedules.looped import breadth_first, gpipe, interleaved, one_forward_one_backward

_BY_NAME: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "gpipe": lambda r, p, m, v: gpipe(r, p, m),
    "1f1b": lambda r, p, m, v: one_forward_one_backward(r, p, m),
    "interleaved": interleaved,
    "breadth-first": breadth_first,
    "zb-h1": lambda r, p, m, v: interleaved(r, p, m, v, zero_bubble=1),
    "zb-h2": lambda r, p, m, v: interleaved(r, p, m, 1, zero_bubble=2),
    "zb-v": lambda r, p, m, v: zero_bubble_v(r, p, m),
    "dualpipe-v": lambda r, p, m, v: dual_pipe_v(r, p, m),
}
SCHEDULES = tuple(_BY_NAME)


def order(schedule: str, rank: int, ranks: int, micro_batches: int, chunks: int = 1) -> list[Action]:
    """What one of `ranks` does. Raises KeyError for an unknown schedule."""
    return _BY_NAME[schedule](rank, ranks, micro_batches, chunks)


def orders(schedule: str, ranks: int, micro_batches: int, chunks: int = 1) -> list[list[Action]]:
    """What each of `ranks` does, in order. Raises KeyError for an unknown schedule."""
    return [order(schedule, rank, ranks, micro_batches, chunks) for rank in range(ranks)]
