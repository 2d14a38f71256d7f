"""When frees that wait for other streams are through, by the times of a run.

The allocator has no clock: alone it takes a block that another stream used (record_stream) for free as soon as it is
asked again, as if the GPU kept up with the host. With the times of the same program it can tell: at each request the
host's clock, against the end of what the using stream had been given when the block was freed.
"""

from __future__ import annotations

import numpy as np

from sim.engine.allocator import CachingAllocator, StreamEvent
from sim.program.program import Ints, Program
from sim.program.world import Floats
from sim.timeline.clock import host_clock
from sim.timeline.lanes import Lanes


class StreamClock:
    """Answers an allocator that plays the lanes' program from its first memory event on."""

    def __init__(self, lanes: Lanes) -> None:
        program = lanes.program
        self._rows: Ints = program.mem_row
        self._host_ns: Floats = np.concatenate(([0.0], host_clock(lanes)))
        self._streams = {stream: _ends(program, lanes, stream) for stream in np.unique(program.row_stream).tolist()}
        self._due_ns: dict[StreamEvent, float] = {}
        self.allocator: CachingAllocator | None = None

    def on_event(self, what: str, event: StreamEvent) -> None:
        """The allocator records an event on a stream, while it plays a free."""
        if what == "record":
            self._due_ns[event] = self._end_ns(event.stream, int(self._rows[self._playing]))

    def finished(self, event: StreamEvent) -> bool:
        """Has the GPU passed it when the host asks for memory?"""
        return bool(self._due_ns[event] <= self._host_ns[self._rows[self._playing]])

    @property
    def _playing(self) -> int:
        assert self.allocator is not None
        return self.allocator.playing

    def _end_ns(self, stream: int, row: int) -> float:
        """When a stream is through with what it was given before a row."""
        if stream not in self._streams:
            return 0.0
        rows, ends = self._streams[stream]
        issued = int(np.searchsorted(rows, row))
        return float(ends[issued - 1]) if issued else 0.0


def _ends(program: Program, lanes: Lanes, stream: int) -> tuple[Ints, Floats]:
    """The rows of a stream that run, and when all up to each have ended."""
    rows = np.flatnonzero(lanes.runs & (program.row_stream == stream))
    return rows, np.maximum.accumulate(lanes.end_ns[rows]) if len(rows) else np.zeros(0)
