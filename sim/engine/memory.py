"""Plays a program's memory events through the caching allocator."""

from __future__ import annotations

import numpy as np

from sim.engine.allocator import AllocatorSettings, CachingAllocator
from sim.engine.stream_clock import StreamClock
from sim.program.program import Program
from sim.timeline.memory import MemoryTimeline, OutOfMemoryEvent


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
        self._timeline: MemoryTimeline | None = None

    def play(self, program: Program) -> MemoryTimeline:
        """Play the events that come after those played before; the timeline is that of the whole program."""
        before = self._timeline
        first = before.played if before is not None else 0
        rest = slice(first, None)
        columns = (program.mem_kind, program.mem_handle, program.mem_bytes, program.mem_stream)
        played = self._allocator.play(*(column[rest].astype(np.int64) for column in columns))
        timeline = MemoryTimeline(
            program=program,
            allocated_bytes=played.allocated_bytes,
            active_bytes=played.active_bytes,
            reserved_bytes=played.reserved_bytes,
            block_bytes=played.block_bytes,
            address=played.address,
            driver_calls=tuple((first + call.event, call.action, call.size_bytes) for call in played.driver_calls),
            out_of_memory=None
            if (failure := played.out_of_memory) is None
            else OutOfMemoryEvent(
                event=first + played.played,
                requested_bytes=failure.requested_bytes,
                driver_bytes=failure.driver_bytes,
                device_free_bytes=failure.device_free_bytes,
                allocated_bytes=failure.allocated_bytes,
                reserved_bytes=failure.reserved_bytes,
            ),
        )
        self._timeline = timeline if before is None else _joined(before, timeline)
        return self._timeline


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
