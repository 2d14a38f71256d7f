"""The host thread of one rank: a process that runs ahead of its GPU, on a clock of its own."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Sequence

from simpy import Environment
from simpy.events import Event

from sim.engine.rendezvous import Rendezvous
from sim.engine.stream import Stream
from sim.program.passage import Passage
from sim.program.world import BURST, DEVICE_SYNC, PASSAGE, SYNC, Burst, RankProgram, World


class Host:
    """Issues rows with times at or ahead of the run's clock. It sleeps in three cases only: until an event has fired
    (SYNC), until all streams have finished (DEVICE_SYNC), and until a full launch queue has room.

    `at_row` is the row it sleeps at or issues, None when it is through; `end_ns` is its clock then.
    """

    def __init__(
        self,
        env: Environment,
        world: World,
        program: RankProgram,
        streams: Sequence[Stream],
        rendezvous: Rendezvous,
    ) -> None:
        self._env, self._queue_rows = env, world.queue_rows
        self._several: dict[int, Sequence[Burst] | Sequence[Passage]] = {BURST: world.bursts, PASSAGE: world.passages}
        self._program, self._streams, self._rendezvous = program, streams, rendezvous
        self.at_row: int | None = None
        self.end_ns = 0.0
        self.rows = array("d")  # of the host alone

    def run(self) -> Generator[Event, None, None]:
        """The process."""
        env, several, streams, queue_rows, program = (
            self._env,
            self._several,
            self._streams,
            self._queue_rows,
            self._program,
        )
        columns = (program.kind, program.stream, program.argument, program.host_ns, program.scale)
        clock_ns = 0.0
        for row, (kind, to, argument, host_ns, scale) in enumerate(zip(*(column.tolist() for column in columns))):
            self.at_row = row
            if kind > PASSAGE:
                start_ns, clock_ns = clock_ns, clock_ns + host_ns
                if kind == SYNC:
                    clock_ns = max(clock_ns, (yield from self._until_fired(argument)))
                elif kind == DEVICE_SYNC:
                    clock_ns = max(clock_ns, (yield from self._until_idle()))
                self.rows.extend((row, start_ns, start_ns, clock_ns))
                continue
            stream = streams[to]
            template = several[kind][argument] if kind in several else None
            launches = 1 if template is None else template.size
            if stream.pending + launches > queue_rows:
                yield stream.drained(queue_rows - launches)
                clock_ns = max(clock_ns, env.now)
            if template is not None:
                stream.push((row, kind, argument, clock_ns, scale), launches)
                clock_ns += template.last_issue_ns
            else:
                clock_ns += host_ns
                stream.push((row, kind, argument, clock_ns, scale), 1)
        self.at_row = None
        self.end_ns = clock_ns

    def _until_fired(self, event: int) -> Generator[Event, None, float]:
        firing = self._rendezvous.firing(event)
        if firing is not None:
            yield firing
        return self._rendezvous.fired_ns[event]

    def _until_idle(self) -> Generator[Event, None, float]:
        """Nothing is issued meanwhile, so the streams can be waited for one after the other."""
        for stream in self._streams:
            if stream.pending:
                yield stream.drained(0)
        return max((stream.end_ns for stream in self._streams), default=0.0)
