"""What a rank issues without meeting another rank, cut into the bursts and passages that the engine plays.

A section is a run of rows on the compute stream and on the stream of a tensor-parallel group that has its link to
itself. Collectives there overlap with products (`ops.tensor_parallel.start` and `finish`); a passage takes both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sim.program.passage import Passage
from sim.program.program import COMPUTE, TENSOR, Ints, Row
from sim.program.world import Bools, largest_burst
from sim.program.world_builder import WorldBuilder

LAUNCH, RECORD, WAIT, COLLECTIVE = map(int, (Row.LAUNCH, Row.RECORD, Row.WAIT, Row.COLLECTIVE))
START = ((RECORD, COMPUTE), (WAIT, TENSOR), (COLLECTIVE, TENSOR), (RECORD, TENSOR))
"""Kinds and streams of the rows that `start` issues; `finish` lets compute wait for the last."""


@dataclass(frozen=True, slots=True)
class SectionRow:
    """`argument`: kernel of the world (also one that stands for a collective), or event counted from the section's first.

    `waits`: how often a recorded event is waited for."""

    kind: int
    stream: int
    argument: int
    waits: int


def section_codes(kinds: Ints, streams: Ints, arguments: Ints, starts: Bools) -> Ints:
    """A number per row, the same in equal sections: events count from those recorded before the section. `starts`: the
    rows that begin a section."""
    records = kinds == RECORD
    on_events = records | (kinds == WAIT)
    waited = np.bincount(arguments[(kinds == WAIT) | (kinds == Row.SYNC)], minlength=int(records.sum()))
    before = np.cumsum(records) - records
    number = np.where(on_events, arguments - before[starts][np.cumsum(starts) - 1], arguments)
    waits = np.zeros(len(kinds), np.int64)
    waits[records] = np.minimum(waited[arguments[records]], 15)
    return number.astype(np.int64) << 20 | waits << 16 | streams.astype(np.int64) << 8 | kinds


def decoded(codes: Ints) -> list[SectionRow]:
    """The rows that a section's numbers stand for."""
    columns = codes & 255, codes >> 8 & 255, codes >> 20, codes >> 16 & 15
    return [SectionRow(*row) for row in zip(*(column.tolist() for column in columns))]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows first .. end - 1 of a section, played as a burst of launches, a passage, or one by one."""

    form: Literal["burst", "passage", "rows"]
    first: int
    end: int


def pieces(rows: Sequence[SectionRow], queue_rows: int) -> list[Piece]:
    """A section as few pieces, each as long as its place in the launch queue allows."""
    most = largest_burst(queue_rows)
    joined: list[Piece] = []
    for unit in _units(rows):
        last = joined[-1] if joined else None
        if last is None or "rows" in (unit.form, last.form) or unit.end - last.first > most:
            joined.append(unit)
        else:
            form: Literal["burst", "passage"] = "passage" if "passage" in (unit.form, last.form) else "burst"
            joined[-1] = Piece(form, last.first, unit.end)
    return [Piece("rows", p.first, p.end) if p.form == "passage" and p.end - p.first > most else p for p in joined]


def _units(rows: Sequence[SectionRow]) -> Iterator[Piece]:
    """Single launches, and runs from the start of a transfer until compute has waited for all that was started."""
    at = 0
    while at < len(rows):
        row = rows[at]
        if row.kind == LAUNCH:
            yield Piece("burst", at, at + 1)
            at += 1
            continue
        end = _joined(rows, at)
        yield Piece("passage", at, end) if end else Piece("rows", at, at + 1)
        at = end or at + 1


def _joined(rows: Sequence[SectionRow], at: int) -> int:
    """Where all transfers are over of which the first is started at row `at`; 0 if none is, or something else is between."""
    running = -1  # the event of the last one
    while at < len(rows):
        row = rows[at]
        if _starts(rows, at):
            running = rows[at + 3].argument
            at += len(START)
        elif row.kind == WAIT and row.stream == COMPUTE and 0 <= row.argument <= running:
            at += 1
            if row.argument == running:
                return at
        elif row.kind == LAUNCH and running >= 0:
            at += 1
        else:
            return 0
    return 0


def _starts(rows: Sequence[SectionRow], at: int) -> bool:
    block = rows[at : at + len(START)]
    if tuple((row.kind, row.stream) for row in block) != START:
        return False
    begun, waits, _, over = block
    return begun.waits == over.waits == 1 and begun.argument == waits.argument


@dataclass(frozen=True, slots=True)
class Transfers:
    """How long each collective of the private stream takes, by its number in the world; the level it lifts kernels to."""

    duration_ns: dict[int, int]
    level: int


def passage_of(
    rows: Sequence[SectionRow], kernel_ns: Ints, launch_ns: Ints, event_ns: int, transfers: Transfers
) -> Passage:
    """A passage of these rows; `kernel_ns` [levels, kernels] and `launch_ns` [kernels] are the world's tables."""
    levels = len(kernel_ns)
    duration_ns = np.zeros((levels, len(rows)), np.int64)
    host_ns = np.full(len(rows), event_ns, np.int64)
    after, raises = np.full(len(rows), -1, np.int64), np.zeros(len(rows), np.int64)
    recorded: dict[int, int] = {}
    for entry, row in enumerate(rows):
        if row.kind == LAUNCH:
            duration_ns[:, entry], host_ns[entry] = kernel_ns[:, row.argument], launch_ns[row.argument]
        elif row.kind == COLLECTIVE:
            duration_ns[:, entry], host_ns[entry] = transfers.duration_ns[row.argument], launch_ns[row.argument]
            raises[entry] = transfers.level
        elif row.kind == RECORD:
            recorded[row.argument] = entry
        else:
            after[entry] = recorded[row.argument]
    beside = np.array([row.stream == TENSOR for row in rows])
    return Passage(host_ns, duration_ns, beside, after, raises)


@dataclass(frozen=True, slots=True)
class Cutter:
    """Cuts sections into bursts and passages of the world, equal ones once."""

    builder: WorldBuilder
    kernel_ns: Ints
    launch_ns: Ints
    event_ns: int
    transfers: Transfers
    known: dict[bytes, list[tuple[Piece, int]]] = field(default_factory=dict)
    """Of a section as codes: its pieces with the number of each burst or passage."""

    def cut(self, codes: Ints) -> list[tuple[Piece, int]]:
        key = codes.tobytes()
        found = self.known.get(key)
        if found is None:
            rows = decoded(codes)
            found = self.known[key] = [
                (piece, self._number(piece, rows[piece.first : piece.end]))
                for piece in pieces(rows, self.builder.queue_rows)
            ]
        return found

    def _number(self, piece: Piece, rows: list[SectionRow]) -> int:
        if piece.form == "burst":
            return self.builder.template(tuple(row.argument for row in rows))
        if piece.form == "passage":
            passage = passage_of(rows, self.kernel_ns, self.launch_ns, self.event_ns, self.transfers)
            return self.builder.passage(passage)
        return -1
