"""Schedules over a V of stages, two chunks per rank: ZB-V (Qi et al. 2024) and DualPipeV.

Rank r holds stage r on the way there and stage 2p-1-r on the way back, so embedding and head meet on rank 0 and the
turn needs no transfer. Orders as torch.distributed.pipelining's.
"""

from __future__ import annotations

from collections import Counter, deque

from sim.runtime.schedules.actions import Action, Kind

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741


class _Order:
    """Collects actions; every stage counts its micro-batches per kind (a B is an I and a W at once)."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.there, self.back = rank, 2 * ranks - 1 - rank
        self.actions: list[Action] = []
        self.weights: deque[Action] = deque()  # put off
        self._next: Counter[tuple[int, Kind]] = Counter()

    def add(self, stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            counted = (I, W) if kind is B else (kind,)
            action = Action(stage, kind, self._next[stage, counted[0]])
            self.actions.append(action)
            for each in counted:
                self._next[stage, each] += 1
            if kind is I:
                self.weights.append(action._replace(kind=W))

    def done(self, stage: int, kind: Kind) -> int:
        return self._next[stage, kind]

    def add_oldest_weight(self) -> None:
        if self.weights:
            action = self.weights.popleft()
            self.actions.append(action)
            self._next[action.stage, W] += 1


def zero_bubble_v(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """ZB-V. Fewer micro-batches than 2p - 1 leave gaps where the missing ones would be."""
    count = max(2 * ranks - 1, micro_batches)
    order = _Order(rank, ranks)
    there, back = order.there, order.back
    for _ in range(2 * (ranks - rank) - 1):
        order.add(there, F)
    for _ in range(rank):
        order.add(back, F)
        order.add(there, F)
    for _ in range(ranks - rank):
        order.add(back, F, I, W)
    while order.done(back, F) < order.done(there, F) or order.done(there, F) < count:
        if order.done(there, F) < count:
            order.add(there, F)
        order.add(there, I, W)
        order.add(back, F, I, W)
    for _ in range(rank):
        order.add(there, I)
        order.add(back, I)
    for _ in range(ranks - rank):
        order.add(there, I, W)
    for stage in (back, there):
        while order.done(stage, W) < order.done(stage, I):
            order.add(stage, W)
    return [action for action in order.actions if action.micro_batch < micro_batches]


def dual_pipe_v(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """DualPipeV, for at least 2p micro-batches. A forward and the backward that would overlap it follow each other."""
    order = _Order(rank, ranks)
    there, back, after = order.there, order.back, ranks - rank - 1
    for _ in range(2 * after):
        order.add(there, F)
    for _ in range(rank + 1):
        order.add(there, F)
        order.add(back, F)
    for _ in range(after):
        order.add(back, I)
        order.add_oldest_weight()
        order.add(back, F)
    for _ in range(micro_batches - 2 * ranks + rank + 1):
        order.add(there, F)
        order.add(back, B)
        order.add(back, F)
        order.add(there, B)
    for _ in range(after):
        order.add(back, B)
        order.add(back, F)
        order.add(there, B)
    splits = False
    for number in range(rank + 1):
        half = number == (rank + 1) // 2
        splits = splits or (half and rank % 2 == 1)
        order.add(back, I if splits else B)
        splits = splits or (half and rank % 2 == 0)
        order.add(there, I if splits else B)
    for _ in range(after):
        order.add_oldest_weight()
        order.add(there, I if splits else B)
    while order.weights:
        order.add_oldest_weight()
    return order.actions
