"""Where processes meet: events that one stream records and others wait for, meetings that start with the last party."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

from simpy import Environment
from simpy.events import Event, Timeout

from sim.engine.gpu import Gpu
from sim.engine.links import Fabric
from sim.program.world import World


class Rendezvous:
    """`fired_ns` by event; `met_ns` (last arrival) and `parted_ns` by meeting. NaN: not yet."""

    def __init__(self, env: Environment, world: World, fabric: Fabric, gpus: Sequence[Gpu]) -> None:
        self._env, self._fabric, self._gpus, self._meetings = env, fabric, gpus, world.meetings
        self._missing = [len(meeting.parties) for meeting in world.meetings]
        self._over: dict[int, Event] = {}  # of meetings that somebody is at
        self._fired: dict[int, Event] = {}  # of events that somebody waits for
        self.fired_ns = [math.nan] * world.events
        self.met_ns = [math.nan] * len(world.meetings)
        self.parted_ns = [math.nan] * len(world.meetings)

    def fire(self, event: int) -> None:
        """A stream has reached the record of an event."""
        self.fired_ns[event] = self._env.now
        waiting = self._fired.pop(event, None)
        if waiting is not None:
            waiting.succeed()

    def firing(self, event: int) -> Event | None:
        """What to yield until an event has fired; None if it has."""
        if not math.isnan(self.fired_ns[event]):
            return None
        if event not in self._fired:
            self._fired[event] = Event(self._env)
        return self._fired[event]

    def meet(self, number: int) -> Generator[Event, None, None]:
        """Arrive at a meeting and stay until it is over. The last to arrive carries it out."""
        self._missing[number] -= 1
        if self._missing[number]:
            if number not in self._over:
                self._over[number] = Event(self._env)
            yield self._over[number]
            return
        meeting = self._meetings[number]
        gpus = [self._gpus[rank] for rank in meeting.ranks]
        self.met_ns[number] = self._env.now
        for gpu in gpus:
            gpu.contend(meeting.level, +1)
        if meeting.latency_ns:
            yield Timeout(self._env, meeting.latency_ns)
        if meeting.bytes:
            yield from self._transfer(number, gpus)
        for gpu in gpus:
            gpu.contend(meeting.level, -1)
        self.parted_ns[number] = self._env.now
        over = self._over.pop(number, None)
        if over is not None:
            over.succeed()

    def _transfer(self, number: int, gpus: Sequence[Gpu]) -> Generator[Event, None, None]:
        meeting = self._meetings[number]
        flow = self._fabric.carry(number, meeting, gpus)
        slowed_by = gpus if meeting.slow != 1.0 else ()
        for gpu in slowed_by:
            gpu.flows[flow] = None
        yield flow.arrived
        for gpu in slowed_by:
            del gpu.flows[flow]
