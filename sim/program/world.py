"""What the engine plays: the programs of all simulated ranks, their bursts, their meetings and the links between them.

    Burst        a template: kernels that a host launches back to back on one stream, shared by all its stamps
    Meeting      a copy (1 party), a send with its recv (2) or a collective (n): one transfer that its parties share
    RankProgram  the rows that one host thread issues, in order: one row per burst, not per kernel
    Passage      a burst with transfers beside it on a stream that serves it alone (sim.program.passage)
    World        all of these; `validate` says everything that would keep it from being played

Pure data: nothing here knows the clock. Letters: N kernels of a burst, L contention levels, R rows of a rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from sim.program.passage import Floats as Floats
from sim.program.passage import Passage
from sim.program.program import Ints

Bools = npt.NDArray[np.bool_]
Party = tuple[int, int]  # (rank, stream)

LAUNCH_QUEUE_ROWS = 1024  # launches that CUDA keeps pending per stream before a launch blocks the host


class RowKind(IntEnum):
    """What a row asks for. `argument` is the burst, event, meeting or passage number; HOST and DEVICE_SYNC have none.

    The first five go to a stream; the host alone lives through the others. SYNC waits for one event, DEVICE_SYNC until
    every stream of the rank has finished all that was issued (cudaDeviceSynchronize; cudaFree implies it).
    """

    BURST = 0
    RECORD = 1
    WAIT = 2
    MEET = 3
    PASSAGE = 4
    SYNC = 5
    HOST = 6
    DEVICE_SYNC = 7


# Plain integers, as they stand in the columns: the engine compares them in its inner loop.
BURST, RECORD, WAIT, MEET, PASSAGE, SYNC, HOST, DEVICE_SYNC = map(int, RowKind)


class WorldError(ValueError):
    """A world that cannot be played. `problems` holds every reason, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def largest_burst(queue_rows: int) -> int:
    """Most kernels of a burst: it takes its places in the launch queue at once, so it may fill a quarter."""
    return max(1, queue_rows // 4)


def _prefix_sums(values: Ints) -> Floats:
    """Sums of the first 0, 1, ... N values along the last axis; exact as long as they stay below 2**53."""
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums


@dataclass(frozen=True, slots=True, eq=False)
class Burst:
    """A template of N kernels: `host_ns` [N] of each launch, `duration_ns` [L, N] of each kernel at each level.

    Level 0 is alone; a higher level is more contended. Integers, so that the prefix sums are exact. With the
    host's clock at `base_ns` before the burst, kernel j is issued at `base_ns + issue_ns[j + 1]`; with nothing to wait
    for it starts `work_ns[level, j]` after the burst does.
    """

    host_ns: Ints
    duration_ns: Ints
    size: int = field(init=False)
    issue_ns: Floats = field(init=False)  # [N + 1]
    work_ns: Floats = field(init=False)  # [L, N + 1]
    first_issue_ns: float = field(init=False)
    last_issue_ns: float = field(init=False)
    total_ns: tuple[float, ...] = field(init=False)  # [L]

    def __post_init__(self) -> None:
        if self.duration_ns.ndim != 2 or self.host_ns.shape != self.duration_ns.shape[1:]:
            raise WorldError([f"a burst has host times {self.host_ns.shape} for durations {self.duration_ns.shape}"])
        if not self.host_ns.size or not self.duration_ns.size:
            raise WorldError(["a burst has no kernel"])
        issue_ns, work_ns = _prefix_sums(self.host_ns), _prefix_sums(self.duration_ns)
        derived = {
            "size": len(self.host_ns),
            "issue_ns": issue_ns,
            "work_ns": work_ns,
            "first_issue_ns": float(issue_ns[1]),
            "last_issue_ns": float(issue_ns[-1]),
            "total_ns": tuple(work_ns[:, -1].tolist()),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """A transfer that starts when the stream of its last party arrives, and holds all parties until it is over.

    It lasts `latency_ns`, then `bytes` flow over every link of `links` at once. Meanwhile kernels on the parties' GPUs
    run at contention `level` or higher.
    """

    parties: tuple[Party, ...]
    bytes: int
    links: tuple[int, ...] = ()
    latency_ns: int = 0
    cap_bytes_per_ns: float = math.inf  # what this transfer reaches alone, by protocol or calibration
    slow: float = 1.0  # factor on the cap while any party's GPU computes
    level: int = 0  # 0 disturbs nobody
    weight: int = 1  # on a shared link it gets so many shares
    ranks: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(dict.fromkeys(rank for rank, _ in self.parties)))

    def problems(self) -> Iterator[str]:
        """What is wrong with the meeting by itself."""
        if not self.parties or len(set(self.parties)) < len(self.parties):
            yield f"parties {self.parties}: at least one, each once"
        if len(set(self.links)) < len(self.links):
            yield f"links {self.links}: each at most once"
        if self.bytes < 0 or self.latency_ns < 0:
            yield f"{self.bytes} bytes after {self.latency_ns} ns: neither may be negative"
        if not self.cap_bytes_per_ns > 0 or not 0 < self.slow < math.inf:
            yield f"cap {self.cap_bytes_per_ns} bytes/ns, slowed by {self.slow}: both must be above zero"
        if self.weight < 1:
            yield f"weight {self.weight}: at least one share"
        if self.bytes > 0 and not self.links and self.cap_bytes_per_ns == math.inf:
            yield "bytes without a link need a cap"


@dataclass(frozen=True, slots=True)
class RankProgram:
    """Rows in the order in which one host thread issues them; all columns have length R.

    `stream` is -1 where a row concerns the host alone; `host_ns` is the cost of issuing (a burst has its own inside);
    `scale` multiplies the kernel times of a BURST row (jitter, a straggler, uneven experts).
    """

    streams: int
    kind: Ints
    stream: Ints
    argument: Ints
    host_ns: Ints
    scale: Floats


@dataclass(frozen=True, slots=True)
class World:
    """Everything that is played in one run. `capacity_bytes_per_ns` has one entry per link; 1 byte/ns is 1 GB/s."""

    ranks: list[RankProgram]
    bursts: list[Burst]
    meetings: list[Meeting]
    capacity_bytes_per_ns: list[float]
    events: int
    levels: int
    queue_rows: int = LAUNCH_QUEUE_ROWS
    passages: list[Passage] = field(default_factory=list)

    def validate(self) -> None:
        """Raise a `WorldError` with every problem, if there is one."""
        problems = [
            *self._table_problems(),
            *(problem for rank in range(len(self.ranks)) for problem in self._row_problems(rank)),
        ]
        if not problems:  # the rows' numbers are in range from here on
            problems = [*self._event_problems(), *self._party_problems()]
        if problems:
            raise WorldError(problems)

    def _table_problems(self) -> Iterator[str]:
        if self.queue_rows < 1:
            yield f"a launch queue of {self.queue_rows} rows holds nothing"
        for link, capacity in enumerate(self.capacity_bytes_per_ns):
            if not 0 < capacity < math.inf:
                yield f"link {link}: capacity {capacity} bytes/ns must be finite and above zero"
        for number, burst in enumerate(self.bursts):
            if len(burst.duration_ns) != self.levels:
                yield f"burst {number}: {len(burst.duration_ns)} levels of duration, but the world has {self.levels}"
            if burst.size > largest_burst(self.queue_rows):
                yield f"burst {number}: {burst.size} kernels, more than {largest_burst(self.queue_rows)}"
            if (burst.host_ns < 0).any() or (burst.duration_ns < 0).any():
                yield f"burst {number}: negative times"
            if ((burst.duration_ns > 0) != (burst.duration_ns[0] > 0)).any():
                yield f"burst {number}: a kernel of no duration alone must have none contended, and the reverse"
        for number, passage in enumerate(self.passages):
            yield from (f"passage {number}: {problem}" for problem in passage.problems())
            if len(passage.duration_ns) != self.levels or passage.raises.max() >= self.levels:
                yield f"passage {number}: has other levels than the world's {self.levels}"
            if passage.size > largest_burst(self.queue_rows):
                yield f"passage {number}: {passage.size} entries, more than {largest_burst(self.queue_rows)}"
        for number, meeting in enumerate(self.meetings):
            yield from (f"meeting {number}: {problem}" for problem in meeting.problems())
            if not 0 <= meeting.level < self.levels:
                yield f"meeting {number}: level {meeting.level}, but the world has {self.levels}"
            if any(not 0 <= link < len(self.capacity_bytes_per_ns) for link in meeting.links):
                yield f"meeting {number}: links {meeting.links}, but the world has {len(self.capacity_bytes_per_ns)}"

    def _row_problems(self, rank: int) -> Iterator[str]:
        program = self.ranks[rank]
        columns = (program.stream, program.argument, program.host_ns, program.scale)
        if any(column.shape != program.kind.shape for column in columns):
            yield f"rank {rank}: columns of different lengths"
            return
        kind, argument = program.kind, program.argument
        on_stream = kind <= PASSAGE
        numbered = np.zeros_like(on_stream)
        for kinds, count in (
            ((BURST,), len(self.bursts)),
            ((MEET,), len(self.meetings)),
            ((PASSAGE,), len(self.passages)),
            ((RECORD, WAIT, SYNC), self.events),
        ):
            numbered |= np.isin(kind, kinds) & ((argument < 0) | (argument >= count))
        checks = (
            ((kind < BURST) | (kind > DEVICE_SYNC), "unknown kind of row"),
            (on_stream & ((program.stream < 0) | (program.stream >= program.streams)), "no such stream"),
            (numbered, "no such burst, event, meeting or passage"),
            (program.host_ns < 0, "negative host time"),
            (~(np.isfinite(program.scale) & (program.scale > 0)), "scale must be finite and above zero"),
        )
        for wrong, text in checks:
            yield from (f"rank {rank} row {row}: {text}" for row in np.flatnonzero(wrong).tolist())

    def _event_problems(self) -> Iterator[str]:
        """An event has one record, which precedes its waits in the order of its own host: no cycle inside a rank."""
        times_recorded = np.zeros(self.events, np.int64)
        for rank, program in enumerate(self.ranks):
            records = np.flatnonzero(program.kind == RECORD)
            waits = np.flatnonzero((program.kind == WAIT) | (program.kind == SYNC))
            recorded, awaited = program.argument[records], program.argument[waits]
            least = int(min(recorded.min(initial=self.events), awaited.min(initial=self.events)))
            most = int(max(recorded.max(initial=least), awaited.max(initial=least)))
            recorded_at = np.full(most - least + 1, len(program.kind))
            recorded_at[recorded[::-1] - least] = records[::-1]  # the first of several
            np.add.at(times_recorded, recorded, 1)
            for row in waits[recorded_at[awaited - least] > waits].tolist():
                yield f"rank {rank} row {row}: waits for event {program.argument[row]}, not recorded before here"
        for event in np.flatnonzero(times_recorded > 1).tolist():
            yield f"event {event}: recorded {times_recorded[event]} times"

    def _each_party_posts_once(self) -> bool:
        streams = max((program.streams for program in self.ranks), default=0)
        codes: dict[int, list[int]] = {}  # of the parties of a meeting, by identity: most stand for many
        for meeting in {id(meeting): meeting for meeting in self.meetings}.values():
            if any(stream >= streams for _, stream in meeting.parties):
                return False
            codes[id(meeting)] = [rank * streams + stream for rank, stream in meeting.parties]
        kinds = len(self.ranks) * streams
        expected = [n * kinds + code for n, meeting in enumerate(self.meetings) for code in codes[id(meeting)]]
        posted = [
            program.argument[rows] * kinds + rank * streams + program.stream[rows]
            for rank, program in enumerate(self.ranks)
            for rows in (np.flatnonzero(program.kind == MEET),)
        ]
        return np.array_equal(
            np.sort(np.array(expected, np.int64)), np.sort(np.concatenate([np.zeros(0, np.int64), *posted]))
        )

    def _party_problems(self) -> Iterator[str]:
        """Every party of a meeting posts it once, on its stream, and nobody else does."""
        if self._each_party_posts_once():
            return
        posts: Counter[tuple[int, Party]] = Counter()
        for rank, program in enumerate(self.ranks):
            rows = program.kind == MEET
            for number, stream in zip(program.argument[rows].tolist(), program.stream[rows].tolist()):
                posts[number, (rank, stream)] += 1
        expected = {(number, party): None for number, meeting in enumerate(self.meetings) for party in meeting.parties}
        for number, party in expected:
            if not posts[number, party]:
                yield f"meeting {number}: rank {party[0]} never posts it on stream {party[1]}"
        for (number, party), times in posts.items():
            if times and (number, party) not in expected:
                yield f"meeting {number}: rank {party[0]} posts it on stream {party[1]}, but is no party there"
            elif times > 1:
                yield f"meeting {number}: rank {party[0]} posts it {times} times on stream {party[1]}"
