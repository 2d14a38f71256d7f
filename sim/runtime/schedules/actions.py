"""What a rank of a pipeline does, one action after the other.

Letters: p ranks, v chunks per rank, S = p v stages, m micro-batches. Stage s is one model part; stages are dealt out to
the ranks in a loop (s mod p), or there and back (a V: ranks 0 1 2 3 3 2 1 0).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """Kinds of actions, as torch.distributed.pipelining abbreviates them. F and B belong to one stage and micro-batch;
    a zero-bubble schedule splits B into I (gradient of the input, which the stage before waits for) and W."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


class Action(NamedTuple):
    """Kind of work on one micro-batch in one stage; prints as 2F0: stage 2, forward, micro-batch 0."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"

    @property
    def passes_back(self) -> bool:
        """Makes the gradient that the stage before waits for."""
        return self.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT)


class Part(NamedTuple):
    """Where a stage is: its rank, and which of the rank's chunks it is."""

    rank: int
    chunk: int


def parts_of(ranks: int, chunks: int, folded: bool = False) -> list[Part]:
    """Rank and chunk of every stage; `folded`: the V."""
    if folded:
        return [Part(s if s < ranks else 2 * ranks - 1 - s, s // ranks) for s in range(2 * ranks)]
    return [Part(s % ranks, s // ranks) for s in range(ranks * chunks)]


def rank_of(stage: int, ranks: int, folded: bool = False) -> int:
    """The rank that holds a stage."""
    return 2 * ranks - 1 - stage if folded and stage >= ranks else stage % ranks


def stages_of(rank: int, ranks: int, chunks: int, folded: bool = False) -> list[int]:
    """Stages of a rank, by chunk."""
    return [stage for stage, part in enumerate(parts_of(ranks, chunks, folded)) if part.rank == rank]


def in_flight(actions: Iterable[Action], until_weights: bool = False) -> int:
    """Most micro-batches (of any stage of the rank) that are between their forward and their backward at once.

    A split backward counts as done with its I, or (`until_weights`) with its W, which is what frees the activations.
    """
    ends = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT if until_weights else Kind.INPUT_GRADIENT)
    now = most = 0
    for action in actions:
        now += action.kind is Kind.FORWARD
        most = max(most, now)
        now -= action.kind in ends
    return most
