"""A stream of one GPU: a process that plays what its host has queued, in order."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Generator

from simpy import Environment
from simpy.events import Event, Timeout

from sim.engine.alarm import Alarm
from sim.engine.burst_math import position, position_starved, starved, work_done
from sim.engine.gpu import Gpu
from sim.engine.rendezvous import Rendezvous
from sim.program.passage import Passage, reached, run
from sim.program.world import BURST, MEET, PASSAGE, RECORD, WAIT, Burst, World
from sim.timeline.records import Part, Piece

Entry = tuple[int, int, int, float, float]
"""(row, kind, argument, issue_ns, scale) of a queued row; a burst carries its host's clock before the first launch."""


class Stream:
    """`pending` counts launches issued and not complete: a burst takes as many as it has kernels, other rows one.

    `at_row` is the row being played, None while nothing is queued.
    """

    def __init__(self, env: Environment, world: World, rendezvous: Rendezvous, gpu: Gpu) -> None:
        self._env, self._bursts, self._rendezvous, self._gpu = env, world.bursts, rendezvous, gpu
        self._passages = world.passages
        self._queue: deque[Entry] = deque()
        self._alarm = Alarm(env)
        self._drain_to, self._drained = -1, Event(env)
        self.pending = 0
        self.at_row: int | None = None
        self.end_ns = 0.0
        self.rows = array("d")
        self.pieces: list[Piece] = []
        self.parts: list[Part] = []

    def push(self, entry: Entry, launches: int) -> None:
        """Queue a row. Its issue time may lie ahead of the run's clock, as the host's clock does."""
        self.pending += launches
        self._queue.append(entry)
        if self.at_row is None:
            self._alarm.ring()

    def drained(self, pending: int) -> Event:
        """What the host yields until no more than so many launches are pending."""
        self._drain_to, self._drained = pending, Event(self._env)
        return self._drained

    def run(self) -> Generator[Event, None, None]:
        """The process. It sleeps for good when its host has nothing more for it."""
        env, queue, rendezvous, bursts = self._env, self._queue, self._rendezvous, self._bursts
        while True:
            while not queue:
                yield self._alarm.until()
            row, kind, argument, issue_ns, scale = queue.popleft()
            self.at_row = row
            launches = 1
            if kind == BURST:
                burst = bursts[argument]
                launches = burst.size
                yield from self._play(row, burst, issue_ns, scale)
            elif kind == PASSAGE:
                passage = self._passages[argument]
                launches = passage.size
                yield from self._pass(row, passage, issue_ns)
            else:
                start_ns = env.now
                if issue_ns > start_ns:
                    yield Timeout(env, issue_ns - start_ns)
                    start_ns = env.now
                if kind == RECORD:
                    rendezvous.fire(argument)
                elif kind == WAIT:
                    if (firing := rendezvous.firing(argument)) is not None:
                        yield firing
                elif kind == MEET:
                    yield from rendezvous.meet(argument)
                self.rows.extend((row, issue_ns, start_ns, env.now))
            self.at_row, self.end_ns = None, env.now
            self.pending -= launches
            if self.pending <= self._drain_to:
                self._drain_to = -1
                self._drained.succeed()

    def _play(self, row: int, burst: Burst, base_ns: float, scale: float) -> Generator[Event, None, None]:
        """Sleep through a burst; plan the rest of it anew whenever the level of the GPU has changed."""
        env, gpu, alarm, pieces = self._env, self._gpu, self._alarm, self.pieces
        first_ns = base_ns + burst.first_issue_ns
        now_ns = env.now
        if first_ns > now_ns:
            yield Timeout(env, first_ns - now_ns)
        gpu.start_burst(alarm)
        kernel, fraction, earlier = 0, 0.0, len(pieces)
        while kernel < burst.size:
            now_ns, level, starts_ns = env.now, gpu.level, None
            if base_ns + burst.last_issue_ns <= now_ns:  # all is issued: each kernel follows its predecessor
                done_ns = work_done(burst.work_ns[level], kernel, fraction)
                end_ns = now_ns + (burst.total_ns[level] - done_ns) * scale
            else:
                starts_ns, ends_ns = starved(burst, scale, base_ns, now_ns, level, kernel, fraction)
                end_ns = float(ends_ns[-1])
            if not kernel and not fraction:
                del pieces[earlier:]  # of a plan overthrown before anything had run
            pieces.append(Piece(row, base_ns, now_ns, level, kernel, fraction, starts_ns))
            yield alarm.until(end_ns)
            while alarm.rung and gpu.level == level:  # there and back in one instant
                yield alarm.until(end_ns)
            if not alarm.rung:
                break
            if starts_ns is None:
                done_ns += (env.now - now_ns) / scale
                kernel, fraction = position(burst.work_ns[level], kernel, done_ns)
            else:
                whole_ns = burst.duration_ns[level] * scale
                kernel, fraction = position_starved(starts_ns, ends_ns, whole_ns, kernel, env.now)
        gpu.end_burst(alarm)

    def _pass(self, row: int, passage: Passage, base_ns: float) -> Generator[Event, None, None]:
        """Sleep through a passage; at a change of the GPU's level go over to the timeline of the new one."""
        env, gpu, alarm, parts, size = self._env, self._gpu, self._alarm, self.parts, passage.size
        first_ns = base_ns + passage.issue_ns[1]
        if first_ns > env.now:
            yield Timeout(env, first_ns - env.now)
        gpu.start_burst(alarm)
        entry, left, starts, ends, earlier = 0, 1.0, [0.0] * size, [0.0] * size, len(parts)
        while entry < size:
            level = gpu.level
            if not entry and left == 1.0:
                del parts[earlier:]  # of a plan overthrown before anything had run
            spans, follows, shift_ns = run(passage, level, base_ns, env.now, entry, left, starts, ends)
            parts.append(Part(row, base_ns, level, follows, shift_ns, spans, left < 1.0))
            end_ns = spans[-1][2] if follows == size else passage.timelines[level].end_ns[-1] + shift_ns
            yield alarm.until(end_ns)
            while alarm.rung and gpu.level == level:  # there and back in one instant
                yield alarm.until(end_ns)
            if not alarm.rung:
                break
            if follows < size:
                timeline = passage.timelines[level]
                starts[follows:] = (timeline.starts[follows:] + shift_ns).tolist()
                ends[follows:] = (timeline.ends[follows:] + shift_ns).tolist()
            entry, left = reached(passage, level, entry, left, starts, ends, env.now)
        gpu.end_burst(alarm)
