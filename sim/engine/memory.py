"""Plays a program's memory events through the caching allocator."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sim.engine.allocator import AllocatorSettings, CachingAllocator
from sim.engine.allocator.oom import OutOfMemory
from sim.engine.stream_clock import StreamClock
from sim.program.periods import Stretch
from sim.program.program import Ints, Program
from sim.timeline.memory import MemoryTimeline, OutOfMemoryEvent

MOST_PERIODS = 16
"""So many periods of a stretch are played in sight of their states."""


def play_memory(
    program: Program, settings_text: str, total_bytes: int, capacity_bytes: int, version: str,
    clock: StreamClock | None = None,
) -> MemoryTimeline:  # fmt: skip
    """The allocator's answer to every event, until the end or an out-of-memory; parameters as MemoryPlay's."""
    return MemoryPlay(settings_text, total_bytes, capacity_bytes, version, clock).play(program)


class MemoryPlay:
    """An allocator and what it has answered: a program can be played, then a longer one that begins with it.

    total_bytes: the device as cudaMemGetInfo shows it; capacity_bytes: what the driver can give to this process (total
    less context and communicators); clock: of a run of the same program,
    so that frees wait for streams. Raises SettingsError for a settings text that PyTorch would not accept.
    """

    def __init__(
        self, settings_text: str, total_bytes: int, capacity_bytes: int, version: str, clock: StreamClock | None = None
    ) -> None:
        settings = AllocatorSettings.parse(settings_text, version)
        finished, on_event = (clock.finished, clock.on_event) if clock is not None else (None, None)
        self._allocator = CachingAllocator(
            settings, total_bytes, capacity_bytes, version, event_finished=finished, on_event=on_event
        )
        if clock is not None:
            clock.allocator = self._allocator
        self._clock = clock
        self._timeline: MemoryTimeline | None = None
        self._skipped: list[tuple[int, int]] = []

    def play(self, program: Program) -> MemoryTimeline:
        """Play the events that come after those played before; the timeline is that of the whole program."""
        before = self._timeline
        first = before.played if before is not None else 0
        run = _Run(self._allocator, program, first, self._skipped)
        if self._repeats():
            for stretch in program.stretches:
                if stretch.begin.events >= first and not run.through(stretch):
                    break
        run.to(len(program.mem_kind))
        timeline = run.timeline()
        self._timeline = timeline if before is None else _joined(before, timeline)
        return self._timeline

    def _repeats(self) -> bool:
        """The allocator may come back to a state: nothing in it has an age, and no clock says when frees are through."""
        allocator, heap = self._allocator, self._allocator.heap
        return self._clock is None and not (heap.numbered or heap.keep_ages or allocator.private_pools)


class _Run:
    """One call of `MemoryPlay.play`: what its events did so far, played or repeated.

    Where equal periods follow each other the allocator comes back to what it was some periods ago, mostly soon: the same
    blocks free, and those of the same tensors, so many periods younger, at the same addresses. Then all repeats itself
    to the byte. What is left out the allocator never sees: handles allocated later move up (`skipped`).
    """

    def __init__(
        self, allocator: CachingAllocator, program: Program, first: int, skipped: list[tuple[int, int]]
    ) -> None:
        self.allocator, self.program, self.skipped = allocator, program, skipped
        self.first = self.at = first
        self.series: list[tuple[Ints, ...]] = []
        self.driver_calls: list[tuple[int, str, int]] = []
        self.failure: OutOfMemory | None = None

    def to(self, event: int) -> bool:
        """Play up to an event; False when memory runs out."""
        if self.failure is not None or event <= self.at:
            return self.failure is None
        program, rest = self.program, slice(self.at, event)
        kind, size, stream = (
            column[rest].astype(np.int64) for column in (program.mem_kind, program.mem_bytes, program.mem_stream)
        )
        played = self.allocator.play(kind, self.seen_as(program.mem_handle[rest].astype(np.int64)), size, stream)
        self.series.append(
            (played.allocated_bytes, played.active_bytes, played.reserved_bytes, played.block_bytes, played.address)
        )
        self.driver_calls += [(self.at + call.event, call.action, call.size_bytes) for call in played.driver_calls]
        self.at += played.played
        self.failure = played.out_of_memory
        return self.failure is None

    def seen_as(self, handles: Ints) -> Ints:
        """Their numbers in the allocator."""
        less = np.zeros_like(handles)
        for oldest, count in self.skipped:
            less[handles >= oldest] += count
        return handles - less

    def through(self, stretch: Stretch) -> bool:
        """Play a stretch, as far as it does not repeat itself; False when memory runs out."""
        period = stretch.period.events
        states: list[tuple[object, ...]] = []
        if not self.to(stretch.begin.events):
            return False
        for done in range(min(stretch.times, MOST_PERIODS)):
            states.append(self.state(stretch, done))
            cycle = next((n for n in range(1, done + 1) if states[-1 - n] == states[-1]), 0)
            if cycle:
                self.repeat(stretch, cycle, (stretch.times - done) // cycle)
                break
            if not self.to(self.at + period):
                return False
        return True

    def state(self, stretch: Stretch, done: int) -> tuple[object, ...]:
        """All that decides what comes, with handles as they would be `done` periods before."""
        heap, player = self.allocator.heap, self.allocator.player
        live = np.flatnonzero(player.alive[: player.seen])
        own = live >= self.seen_as(np.array([stretch.oldest.handles]))
        ages = live - own * (done * stretch.period.handles)
        places = (ages, player.position[live], player.size[live], player.recorded[live])
        return (
            heap.changes,
            dict(heap.at_start),
            dict(heap.unmapped_ends),
            self.allocator.pending.waiting(),
            player.used_elsewhere(),
            *(column.tobytes() for column in places),
        )

    def repeat(self, stretch: Stretch, cycle: int, times: int) -> None:
        """What the last `cycle` periods did, `times` more."""
        events = cycle * stretch.period.events
        self.series.append(tuple(np.tile(_end(column, events), times) for column in zip(*self.series)))
        self.skipped.append((stretch.oldest.handles, times * cycle * stretch.period.handles))
        self.at += times * events

    def timeline(self) -> MemoryTimeline:
        """Of the events played and repeated."""
        nothing = (np.zeros(0, np.int64),) * 5
        allocated, active, reserved, block_bytes, address = map(np.concatenate, zip(nothing, *self.series))
        failure = self.failure
        return MemoryTimeline(
            program=self.program,
            allocated_bytes=allocated,
            active_bytes=active,
            reserved_bytes=reserved,
            block_bytes=block_bytes,
            address=address,
            driver_calls=tuple(self.driver_calls),
            out_of_memory=None
            if failure is None
            else OutOfMemoryEvent(
                event=self.at,
                requested_bytes=failure.requested_bytes,
                driver_bytes=failure.driver_bytes,
                device_free_bytes=failure.device_free_bytes,
                allocated_bytes=failure.allocated_bytes,
                reserved_bytes=failure.reserved_bytes,
            ),
        )


def _end(parts: Iterable[Ints], count: int) -> Ints:
    """The last entries of a column that is there in parts."""
    last: list[Ints] = []
    for part in reversed(list(parts)):
        last.insert(0, part[-count:])
        count -= len(last[0])
        if not count:
            break
    return np.concatenate(last)


def _joined(before: MemoryTimeline, after: MemoryTimeline) -> MemoryTimeline:
    return MemoryTimeline(
        program=after.program,
        allocated_bytes=np.concatenate((before.allocated_bytes, after.allocated_bytes)),
        active_bytes=np.concatenate((before.active_bytes, after.active_bytes)),
        reserved_bytes=np.concatenate((before.reserved_bytes, after.reserved_bytes)),
        block_bytes=np.concatenate((before.block_bytes, after.block_bytes)),
        address=np.concatenate((before.address, after.address)),
        driver_calls=before.driver_calls + after.driver_calls,
        out_of_memory=after.out_of_memory,
    )
