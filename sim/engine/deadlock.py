"""Who waits for whom when nothing moves any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sim.program.program import Program, Row
from sim.program.world import DEVICE_SYNC, MEET, RECORD, SYNC, WAIT, World

Waiter = tuple[int, int | None]  # (rank, stream), or (rank, None) for its host


@dataclass(frozen=True, slots=True)
class Stuck:
    """One member of a cycle of waits: a stream, or the host where `stream` is None. An idle stream has no row."""

    rank: int
    stream: int | None
    row: int | None
    reason: str

    def __str__(self) -> str:
        who = "host" if self.stream is None else f"stream {self.stream}"
        where = "" if self.row is None else f" at row {self.row}"
        return f"rank {self.rank} {who}{where} {self.reason}"


class DeadlockError(RuntimeError):
    """The world cannot be played to its end: each member of `cycle` waits for the next, the last for the first."""

    def __init__(self, cycle: Sequence[Stuck]) -> None:
        super().__init__("deadlock:\n" + "\n".join(f"  {stuck}" for stuck in cycle))
        self.cycle = tuple(cycle)


@dataclass(frozen=True, slots=True)
class Standstill:
    """Where everybody is when nothing is scheduled: hosts by rank, streams by rank and number.

    A row is None for a host that is through and for a stream with nothing queued.
    """

    host_row: Sequence[int | None]
    stream_row: Sequence[Sequence[int | None]]
    pending: Sequence[Sequence[int]]

    def first_stuck(self) -> Waiter | None:
        """Somebody who is not through, streams first."""
        for rank, rows in enumerate(self.stream_row):
            for stream, row in enumerate(rows):
                if row is not None:
                    return rank, stream
        return next(((rank, None) for rank, row in enumerate(self.host_row) if row is not None), None)


def wait_cycle(world: World, standstill: Standstill) -> list[Stuck]:
    """Follow "waits for" from somebody who is stuck until one repeats; empty if nobody is stuck."""
    recorder: dict[int, Waiter] = {}
    for rank, program in enumerate(world.ranks):
        records = program.kind == RECORD
        for event, stream in zip(program.argument[records].tolist(), program.stream[records].tolist()):
            recorder[event] = rank, stream
    who = standstill.first_stuck()
    chain: dict[Waiter, Stuck] = {}
    while who is not None and who not in chain:
        rank, stream = who
        if stream is None:
            chain[who], who = _host_waits(world, standstill, recorder, rank)
        else:
            chain[who], who = _stream_waits(world, standstill, recorder, rank, stream)
    members = list(chain)
    return [chain[member] for member in members[members.index(who) :]] if who is not None else []


def _host_waits(
    world: World, standstill: Standstill, recorder: dict[int, Waiter], rank: int
) -> tuple[Stuck, Waiter | None]:
    row, program = standstill.host_row[rank], world.ranks[rank]
    if row is None:
        return Stuck(rank, None, None, "has nothing more to issue"), None
    kind, argument = program.kind[row], int(program.argument[row])
    if kind == SYNC:
        return Stuck(rank, None, row, f"waits for event {argument}"), recorder[argument]
    if kind == DEVICE_SYNC:
        unfinished = int(np.flatnonzero(standstill.pending[rank])[0])
        return Stuck(rank, None, row, "waits for all streams"), (rank, unfinished)
    full = int(program.stream[row])
    return Stuck(rank, None, row, f"waits for room in the launch queue of stream {full}"), (rank, full)


def _stream_waits(
    world: World, standstill: Standstill, recorder: dict[int, Waiter], rank: int, stream: int
) -> tuple[Stuck, Waiter | None]:
    row, program = standstill.stream_row[rank][stream], world.ranks[rank]
    if row is None:
        return Stuck(rank, stream, None, "waits for its host"), (rank, None)
    kind, argument = program.kind[row], int(program.argument[row])
    if kind == WAIT:
        return Stuck(rank, stream, row, f"waits for event {argument}"), recorder[argument]
    absent = next(party for party in world.meetings[argument].parties if not _is_at(world, standstill, party, argument))
    reason = f"waits in meeting {argument} for rank {absent[0]} stream {absent[1]}"
    return Stuck(rank, stream, row, reason), absent


def _is_at(world: World, standstill: Standstill, party: tuple[int, int], meeting: int) -> bool:
    rank, stream = party
    row = standstill.stream_row[rank][stream]
    program = world.ranks[rank]
    return row is not None and program.kind[row] == MEET and program.argument[row] == meeting


def with_transfers_named(error: DeadlockError, world: World, programs: Sequence[Program]) -> DeadlockError:
    """The same deadlock in the words of a pipeline: who waits to send or receive what."""
    return DeadlockError([_named(stuck, world, programs) for stuck in error.cycle])


def _named(stuck: Stuck, world: World, programs: Sequence[Program]) -> Stuck:
    if stuck.row is None or stuck.stream is None or world.ranks[stuck.rank].kind[stuck.row] != MEET:
        return stuck
    rows, program = world.ranks[stuck.rank], programs[stuck.rank]
    posted = int(np.sum((rows.kind == MEET) & (rows.stream == stuck.stream) & (np.arange(len(rows.kind)) < stuck.row)))
    moves = np.isin(program.row_kind, (Row.SEND, Row.RECEIVE)) & (program.row_stream == stuck.stream)
    found = np.flatnonzero(moves)[posted : posted + 1].tolist()
    if not found:
        return stuck
    transfer = program.transfers[program.row_argument[found[0]]]
    if program.row_kind[found[0]] == Row.SEND:
        return replace(stuck, reason=f"waits to send the {transfer} to rank {transfer.receiver}")
    return replace(stuck, reason=f"waits to receive the {transfer} (rank {transfer.sender})")
