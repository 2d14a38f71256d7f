"""The reference: every rule of the engine in its plainest form, one SimPy event or more per kernel. Slow on purpose.

It is the specification that the engine is compared with, so it shares nothing with it but the world.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import simpy

from sim.program.passage import Passage
from sim.program.world import BURST, DEVICE_SYNC, HOST, MEET, PASSAGE, RECORD, SYNC, WAIT, Meeting, RankProgram, World


class Signal:
    """Something that changes now and then; `changed` fires at the next change."""

    def __init__(self, env: simpy.Environment) -> None:
        self.env, self.changed = env, env.event()

    def fire(self) -> None:
        old, self.changed = self.changed, self.env.event()
        old.succeed()


class Gpu(Signal):
    """Counts the meetings of each level that run here, and the streams inside a burst."""

    def __init__(self, env: simpy.Environment, levels: int) -> None:
        super().__init__(env)
        self.meetings, self.bursts = [0] * levels, 0

    @property
    def level(self) -> int:
        return max((level for level, running in enumerate(self.meetings) if running), default=0)

    def contend(self, level: int, change: int) -> None:
        self.meetings[level] += change
        self.fire()

    def compute(self, change: int) -> None:
        self.bursts += change
        self.fire()


@dataclass(eq=False)
class Flow:
    meeting: Meeting
    gpus: list[Gpu]
    arrived: simpy.Event
    left: float
    rate: float = 0.0

    @property
    def cap(self) -> float:
        computing = any(gpu.bursts for gpu in self.gpus)
        return self.meeting.cap_bytes_per_ns * (self.meeting.slow if computing else 1.0)


def max_min(flows: list[Flow], capacity: list[float]) -> dict[Flow, float]:
    """Raise all rates together, in proportion to their weights; a flow stops at its cap, or when a link is full."""
    rate = dict.fromkeys(flows, 0.0)
    rising = set(flows)
    while rising:
        used = {link for flow in rising for link in flow.meeting.links}
        room = {k: capacity[k] - sum(rate[flow] for flow in flows if k in flow.meeting.links) for k in used}
        users = {k: sum(flow.meeting.weight for flow in rising if k in flow.meeting.links) for k in used}
        step = min(
            [room[k] / users[k] for k in used] + [(flow.cap - rate[flow]) / flow.meeting.weight for flow in rising]
        )
        for flow in rising:
            rate[flow] += step * flow.meeting.weight
        full = {k for k in used if room[k] - step * users[k] <= 1e-9 * capacity[k]}
        rising = {f for f in rising if rate[f] < f.cap * (1 - 1e-12) and not full & set(f.meeting.links)}
    return rate


class Fabric:
    """Settles all flows and plans all of them anew at every change."""

    def __init__(self, env: simpy.Environment, capacity: list[float]) -> None:
        self.env, self.capacity = env, capacity
        self.flows: list[Flow] = []
        self.settled_at, self.version = 0.0, 0

    def carry(self, meeting: Meeting, gpus: list[Gpu]) -> simpy.Event:
        self.settle()
        flow = Flow(meeting, gpus, self.env.event(), meeting.bytes)
        self.flows.append(flow)
        self.plan()
        return flow.arrived

    def settle(self) -> None:
        for flow in self.flows:
            flow.left -= flow.rate * (self.env.now - self.settled_at)
        self.settled_at = self.env.now

    def plan(self) -> None:
        self.settle()
        self.version += 1
        for flow, rate in max_min(self.flows, self.capacity).items():
            flow.rate = rate
        if self.flows:
            first = min(self.flows, key=lambda flow: flow.left / flow.rate)
            self.env.process(self.arrive(first, self.version))

    def arrive(self, flow: Flow, version: int):
        yield self.env.timeout(max(0.0, flow.left / flow.rate))
        if version == self.version:
            self.settle()
            self.flows.remove(flow)
            flow.arrived.succeed()
            self.plan()


@dataclass
class NaivePlayed:
    """Times by rank and (row, kernel): issue, start, end. `stuck` if not everything came to its end."""

    times: list[dict[tuple[int, int], tuple[float, float, float]]]
    host_end: list[float]
    met: list[float]
    parted: list[float]
    stuck: bool


@dataclass
class Rank:
    """What the processes of one rank share."""

    program: RankProgram
    gpu: Gpu
    queues: list[simpy.Store]
    completed: Signal
    pending: list[int]
    times: dict[tuple[int, int], tuple[float, float, float]] = field(default_factory=dict)
    host_end: float = math.nan


class Crossing:
    """One playing of a passage: its entries as they are issued, and what runs beside."""

    def __init__(self, env: simpy.Environment, passage: Passage) -> None:
        self.env, self.passage = env, passage
        self.begun = env.event()
        self.issued = [env.event() for _ in range(passage.size)]
        self.ended = [env.event() for _ in range(passage.size)]
        self.level = Gpu(env, 100)

    def issue(self, times: dict, row: int, entry: int) -> None:
        self.issued[entry].succeed(self.env.now)
        if entry == 0:
            self.env.process(self.side(times, row))

    def side(self, times: dict, row: int):
        yield self.begun
        for entry in np.flatnonzero(self.passage.beside).tolist():
            issue = yield self.issued[entry]
            if self.passage.after[entry] >= 0:
                yield self.ended[self.passage.after[entry]]
            start = self.env.now
            if self.passage.raises[entry]:
                self.level.contend(self.passage.raises[entry], +1)
            yield self.env.timeout(self.passage.duration_ns[0, entry])
            if self.passage.raises[entry]:
                self.level.contend(self.passage.raises[entry], -1)
            times[row, entry] = issue, start, self.env.now
            self.ended[entry].succeed()

    def main(self, rank: Rank, row: int):
        for entry in np.flatnonzero(~self.passage.beside).tolist():
            issue = yield self.issued[entry]
            start, left = self.env.now, 1.0
            if self.passage.after[entry] >= 0:
                yield self.ended[self.passage.after[entry]]
            durations = self.passage.duration_ns[:, entry]
            while left > 0:
                begun, level = self.env.now, max(rank.gpu.level, self.level.level)
                end = self.env.timeout(left * durations[level])
                yield end | rank.gpu.changed | self.level.changed
                if end.processed:
                    break
                left -= (self.env.now - begun) / durations[level] if durations[level] else 1.0
            rank.times[row, entry] = issue, start, self.env.now
            self.ended[entry].succeed()


class NaiveEngine:
    def __init__(self, world: World) -> None:
        env = self.env = simpy.Environment()
        self.world = world
        self.fabric = Fabric(env, world.capacity_bytes_per_ns)
        self.ranks = [
            Rank(
                program=program,
                gpu=Gpu(env, world.levels),
                queues=[simpy.Store(env) for _ in range(program.streams)],
                completed=Signal(env),
                pending=[0] * program.streams,
            )
            for program in world.ranks
        ]
        self.fired = [env.event() for _ in range(world.events)]
        self.arrived = [0] * len(world.meetings)
        self.over = [env.event() for _ in world.meetings]
        self.met = [math.nan] * len(world.meetings)
        self.parted = [math.nan] * len(world.meetings)

    def play(self) -> NaivePlayed:
        for rank in self.ranks:
            self.env.process(self.host(rank))
            self.env.process(self.watch(rank.gpu))
            for stream in range(rank.program.streams):
                self.env.process(self.stream(rank, stream))
        self.env.run()
        return NaivePlayed(
            times=[rank.times for rank in self.ranks],
            host_end=[rank.host_end for rank in self.ranks],
            met=self.met,
            parted=self.parted,
            stuck=any(math.isnan(rank.host_end) or any(rank.pending) for rank in self.ranks),
        )

    def watch(self, gpu: Gpu):
        while True:
            yield gpu.changed
            self.fabric.plan()

    def host(self, rank: Rank):
        env, program = self.env, rank.program
        columns = (program.kind, program.stream, program.argument, program.host_ns)
        for row, (kind, stream, argument, cost) in enumerate(zip(*(column.tolist() for column in columns))):
            start = env.now
            if kind in (SYNC, HOST, DEVICE_SYNC):
                yield env.timeout(cost)
                if kind == SYNC:
                    yield self.fired[argument]
                while kind == DEVICE_SYNC and any(rank.pending):
                    yield rank.completed.changed
                rank.times[row, 0] = start, start, env.now
                continue
            if kind == PASSAGE:
                costs = self.world.passages[argument].host_ns.tolist()
            else:
                costs = self.world.bursts[argument].host_ns.tolist() if kind == BURST else [cost]
            while rank.pending[stream] + len(costs) > self.world.queue_rows:
                yield rank.completed.changed
            rank.pending[stream] += len(costs)
            crossing = Crossing(env, self.world.passages[argument]) if kind == PASSAGE else None
            for kernel, cost_of_launch in enumerate(costs):
                yield env.timeout(cost_of_launch)
                if crossing is not None:
                    if kernel == 0:
                        rank.queues[stream].put((row, kind, crossing, 0, len(costs), env.now))
                    crossing.issue(rank.times, row, kernel)
                    continue
                rank.queues[stream].put((row, kind, argument, kernel, len(costs), env.now))
        rank.host_end = env.now

    def stream(self, rank: Rank, stream: int):
        env, gpu = self.env, rank.gpu
        while True:
            row, kind, argument, kernel, kernels, issue = yield rank.queues[stream].get()
            start = env.now
            if kind == BURST:
                if kernel == 0:
                    gpu.compute(+1)
                yield from self.kernel(
                    gpu, self.world.bursts[argument].duration_ns[:, kernel] * rank.program.scale[row]
                )
                if kernel == kernels - 1:
                    gpu.compute(-1)
            elif kind == PASSAGE:
                gpu.compute(+1)
                argument.begun.succeed()
                yield from argument.main(rank, row)
                gpu.compute(-1)
                rank.pending[stream] -= kernels
                rank.completed.fire()
                continue
            elif kind == WAIT:
                yield self.fired[argument]
            elif kind == RECORD:
                self.fired[argument].succeed()
            elif kind == MEET:
                self.arrived[argument] += 1
                if self.arrived[argument] == len(self.world.meetings[argument].parties):
                    env.process(self.meeting(argument))
                yield self.over[argument]
            rank.times[row, kernel] = issue, start, env.now
            if kernel == kernels - 1:
                rank.pending[stream] -= kernels
                rank.completed.fire()

    def kernel(self, gpu: Gpu, durations):
        left = 1.0
        while left > 0:
            begun, level = self.env.now, gpu.level
            end = self.env.timeout(left * durations[level])
            yield end | gpu.changed
            if end.processed:
                return
            left -= (self.env.now - begun) / durations[level] if durations[level] else 1.0

    def meeting(self, number: int):
        meeting = self.world.meetings[number]
        gpus = [self.ranks[rank].gpu for rank in sorted({rank for rank, _ in meeting.parties})]
        self.met[number] = self.env.now
        for gpu in gpus:
            gpu.contend(meeting.level, +1)
        yield self.env.timeout(meeting.latency_ns)
        if meeting.bytes:
            yield self.fabric.carry(meeting, gpus)
        for gpu in gpus:
            gpu.contend(meeting.level, -1)
        self.parted[number] = self.env.now
        self.over[number].succeed()
