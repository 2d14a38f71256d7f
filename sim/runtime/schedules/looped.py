"""Schedules over stages dealt out in a loop: GPipe, 1F1B, breadth first, interleaved, and the zero-bubble ZB-H1 and ZB-H2.

Sources: GPipe (Huang et al. 2019), PipeDream-Flush (Narayanan et al. 2021), breadth first (Lamy-Poirier 2023),
interleaving (Narayanan et al. 2021), zero bubble (Qi et al. 2024); orders as torch.distributed.pipelining's, which has no
ZB-H2.
"""

from __future__ import annotations

from collections import Counter

from sim.runtime.schedules.actions import Action, Kind


def gpipe(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """All forwards, then all backwards in the same order."""
    return [Action(rank, kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(micro_batches)]


def one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Forwards until the first backward can come, then alternately one backward and one forward."""
    ahead = min(micro_batches, ranks - rank)
    actions = [Action(rank, Kind.FORWARD, m) for m in range(ahead)]
    for m in range(micro_batches):
        actions.append(Action(rank, Kind.BACKWARD, m))
        if ahead + m < micro_batches:
            actions.append(Action(rank, Kind.FORWARD, ahead + m))
    return actions


def breadth_first(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    """All micro-batches through one chunk after the other, and back the same way."""
    there = [Action(rank + c * ranks, Kind.FORWARD, m) for c in range(chunks) for m in range(micro_batches)]
    return there + [action._replace(kind=Kind.BACKWARD) for action in reversed(there)]


def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int, zero_bubble: int = 0) -> list[Action]:
    """Rounds of about p micro-batches: each goes through all chunks of the rank before the next round begins.

    A rank is 2 forwards further ahead than the next one, so that transfers hide. `zero_bubble` splits backwards: 1 (ZB-H1)
    with 1 forward ahead; rank r puts a weight gradient off by r backwards, which fills the bubble at the end. 2 (ZB-H2) with
    2 ahead, put off by 2 r: no bubble at the beginning either, for the memory of 2 p - 1 micro-batches on every rank.
    """
    size = micro_batches // max(1, micro_batches // ranks)
    count = micro_batches * chunks
    ahead = min(count, (chunks - 1) * size + (zero_bubble or 2) * (ranks - 1 - rank))
    forwards = _numbered(rank, ranks, [n // size % chunks for n in range(count)], Kind.FORWARD)
    order = [chunks - 1 - n // size % chunks for n in range(count)]
    backwards = _numbered(rank, ranks, order, Kind.INPUT_GRADIENT if zero_bubble else Kind.BACKWARD)
    weights = [action._replace(kind=Kind.WEIGHT_GRADIENT) for action in backwards] if zero_bubble else []
    actions, later = forwards[:ahead], zero_bubble * rank
    for n in range(count):
        actions += forwards[ahead + n : ahead + n + 1]
        actions.append(backwards[n])
        actions += weights[n - later : n - later + 1] if n >= later else []
    return actions + weights[max(0, count - later) :]


def _numbered(rank: int, ranks: int, chunks: list[int], kind: Kind) -> list[Action]:
    """Actions on the chunks in this order, each chunk's micro-batches counted from 0."""
    done: Counter[int] = Counter()
    actions = []
    for chunk in chunks:
        actions.append(Action(rank + chunk * ranks, kind, done[chunk]))
        done[chunk] += 1
    return actions
