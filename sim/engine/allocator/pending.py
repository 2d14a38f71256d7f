"""Frees that wait: blocks used by other streams, and the events that must finish before they are reusable."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from sim.engine.allocator.blocks import Block, PrivatePool, StreamEvent

if TYPE_CHECKING:
    from sim.engine.allocator.allocator import CachingAllocator


class PendingFrees:
    """Per stream, a queue of (event, block) in the order of the frees; one unfinished event holds back its queue."""

    def __init__(
        self,
        allocator: CachingAllocator,
        event_finished: Callable[[StreamEvent], bool] | None,
        on_event: Callable[[str, StreamEvent], None] | None,
    ) -> None:
        self.allocator = allocator
        self.event_finished = event_finished
        self.on_event = on_event
        self.queues: dict[int, deque[tuple[StreamEvent, Block]]] = {}
        self.deferred: list[Block] = []
        """Freed where no event may be recorded yet (see CachingAllocator.may_wait)."""
        self.recorded: dict[int, int] = {}
        """Events recorded so far on each stream."""

    def __bool__(self) -> bool:
        return bool(self.queues or self.deferred)

    def waiting(self) -> dict[int, list[int]]:
        """Per stream, where the blocks lie that wait for it, in order."""
        return {stream: [block.position for _, block in queue] for stream, queue in self.queues.items()}

    def add(self, block: Block) -> None:
        """A block used by other streams is being freed: record an event on each of them, now or as soon as allowed."""
        block.state = "pending"
        if self.allocator.may_wait:
            self._record(block)
        else:
            self.deferred.append(block)

    def _record(self, block: Block) -> None:
        streams = sorted(block.other_streams)
        block.other_streams.clear()
        for stream in streams:
            number = self.recorded.get(stream, 0) + 1
            self.recorded[stream] = number
            event = StreamEvent(stream, number)
            block.outstanding += 1
            self.queues.setdefault(stream, deque()).append((event, block))
            self._tell("record", event)

    def process(self) -> None:
        """Complete the frees whose events have finished; asks without waiting."""
        self._record_deferred()
        for stream in sorted(self.queues):
            queue = self.queues[stream]
            while queue and (self.event_finished is None or self.event_finished(queue[0][0])):
                self._passed(queue.popleft()[1])
            if not queue:
                del self.queues[stream]

    def wait(self, only: PrivatePool | None = None) -> None:
        """Wait for every event (of one private pool's blocks) and complete the frees."""
        self._record_deferred()
        for stream in sorted(self.queues):
            queue = self.queues.pop(stream)
            left: deque[tuple[StreamEvent, Block]] = deque()
            for event, block in queue:
                if only is None or (block.segment is not None and block.segment.pool.owner is only):
                    self._tell("wait", event)
                    self._passed(block)
                else:
                    left.append((event, block))
            if left:
                self.queues[stream] = left

    def wait_stream(self, stream: int) -> None:
        """The host waits until a stream is idle."""
        self._tell("wait_stream", StreamEvent(stream, self.recorded.get(stream, 0)))

    def _record_deferred(self) -> None:
        for block in self.deferred:
            self._record(block)
        self.deferred.clear()

    def _passed(self, block: Block) -> None:
        block.outstanding -= 1
        if block.outstanding == 0:
            self.allocator.complete_free(block)

    def _tell(self, what: str, event: StreamEvent) -> None:
        if self.on_event:
            self.on_event(what, event)
