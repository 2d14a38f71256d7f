"""Transfers as fluid flows over shared links: max-min fair, each limited by a cap of its own. Rates in bytes/ns."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

from simpy import Environment
from simpy.events import Event

from sim.engine.alarm import Alarm, AtEndOfInstant
from sim.program.world import Meeting
from sim.timeline.records import RateChange


class Computing(Protocol):
    """What a flow asks of a GPU."""

    @property
    def busy(self) -> int:
        """How many of its streams are inside a burst."""


def share(
    caps: Sequence[float],
    paths: Sequence[Sequence[int]],
    capacity: Sequence[float],
    weights: Sequence[int] | None = None,
) -> list[float]:
    """Max-min fair rates of flows with these caps, paths (link numbers) and weights (shares; None: one each).

    A flow without links gets its cap. All rates rise together, each in proportion to its weight, and a flow stops at
    its cap or when a link on its path is full. The link with the smallest share for its flows fills first: whoever has a
    cap below that stops there, else the link's own flows stop.
    """
    weights = weights or [1] * len(caps)
    room: dict[int, float] = {}
    users: dict[int, int] = {}  # shares on a link
    for path, weight in zip(paths, weights):
        for link in path:
            room[link] = capacity[link]
            users[link] = users.get(link, 0) + weight
    rising = dict(enumerate(caps))
    rates = [0.0] * len(caps)
    while rising:
        fair, tightest = min(((room[link] / n, link) for link, n in users.items() if n), default=(math.inf, -1))
        stopped = [flow for flow, cap in rising.items() if cap <= fair * weights[flow]]
        for flow in stopped or [flow for flow in rising if tightest in paths[flow]]:
            rates[flow] = rate = min(rising.pop(flow), fair * weights[flow])
            for link in paths[flow]:
                room[link] -= rate
                users[link] -= weights[flow]
    return rates


class Flow:
    """The bytes of a meeting on their way: at `rate` since `since_ns`, when `left_bytes` were left."""

    __slots__ = ("arrival_ns", "arrived", "gpus", "left_bytes", "meeting", "number", "rate", "since_ns")

    def __init__(self, env: Environment, number: int, meeting: Meeting, gpus: Sequence[Computing]) -> None:
        self.number, self.meeting, self.gpus = number, meeting, gpus
        self.left_bytes, self.rate, self.since_ns, self.arrival_ns = float(meeting.bytes), 0.0, env.now, math.inf
        self.arrived = Event(env)

    def cap(self) -> float:
        """What it reaches with every link to itself, as things are."""
        meeting = self.meeting
        if meeting.slow != 1.0 and any(gpu.busy for gpu in self.gpus):
            return meeting.cap_bytes_per_ns * meeting.slow
        return meeting.cap_bytes_per_ns

    def change_rate(self, now_ns: float, rate: float) -> None:
        """Move the bytes that are left at another rate."""
        self.left_bytes = max(0.0, self.left_bytes - self.rate * (now_ns - self.since_ns))
        self.rate, self.since_ns = rate, now_ns
        self.arrival_ns = now_ns + self.left_bytes / rate


class Fabric:
    """All links with the flows on them.

    The changes of one instant are planned together at its end, and only for the flows that share links with a change,
    directly or through others. One process sleeps until the next arrival.
    """

    def __init__(self, env: Environment, capacity: Sequence[float], rates: list[RateChange] | None) -> None:
        self._env, self._capacity, self._rates = env, capacity, rates
        self._on: list[dict[Flow, None]] = [{} for _ in capacity]
        self._changed: dict[Flow, None] = {}
        self._arrivals: list[tuple[float, int, Flow]] = []  # a heap; an entry is stale if the flow's arrival differs
        self._order = count()
        self._next_ns = math.inf
        self._alarm = Alarm(env)

    def carry(self, number: int, meeting: Meeting, gpus: Sequence[Computing]) -> Flow:
        """Start moving the bytes of a meeting; `arrived` of the flow fires with the last one."""
        flow = Flow(self._env, number, meeting, gpus)
        for link in meeting.links:
            self._on[link][flow] = None
        self.touch((flow,))
        return flow

    def touch(self, flows: Iterable[Flow]) -> None:
        """Plan these flows anew at the end of this instant."""
        if not self._changed:
            AtEndOfInstant(self._env, self._plan)
        self._changed.update(dict.fromkeys(flows))

    def run(self) -> Generator[Event, None, None]:
        """The process that lets flows arrive."""
        arrivals, alarm = self._arrivals, self._alarm
        while True:
            while arrivals and arrivals[0][2].arrival_ns != arrivals[0][0]:
                heappop(arrivals)
            self._next_ns = arrivals[0][0] if arrivals else math.inf
            yield alarm.until(self._next_ns if arrivals else None)
            if not alarm.rung:
                due_ns, _, flow = arrivals[0]
                if flow.arrival_ns == due_ns == self._next_ns:
                    heappop(arrivals)
                    self._arrive(flow)

    def _arrive(self, flow: Flow) -> None:
        on, links = self._on, flow.meeting.links
        for link in links:
            del on[link][flow]
        flow.arrival_ns = math.inf
        if self._rates is not None:
            self._rates.append((self._env.now, flow.number, 0.0))
        others = [other for link in links for other in on[link]]
        if others:
            self.touch(others)
        flow.arrived.succeed()

    def _plan(self) -> None:
        changed, self._changed = self._changed, {}
        flows = self._connected(changed)
        now_ns = self._env.now
        shares = share(
            [flow.cap() for flow in flows],
            [flow.meeting.links for flow in flows],
            self._capacity,
            [flow.meeting.weight for flow in flows],
        )
        for flow, rate in zip(flows, shares):
            if rate != flow.rate:
                flow.change_rate(now_ns, rate)
                heappush(self._arrivals, (flow.arrival_ns, next(self._order), flow))
                if self._rates is not None:
                    self._rates.append((now_ns, flow.number, rate))
        if self._arrivals and self._arrivals[0][0] < self._next_ns:
            self._alarm.ring()

    def _connected(self, seeds: Iterable[Flow]) -> list[Flow]:
        """The flows that share links with the seeds, directly or through others; those that have arrived left out."""
        found = {flow: None for flow in seeds if not flow.arrived.triggered}
        reached: set[int] = set()
        todo = list(found)
        for flow in todo:  # grows while it is walked
            for link in flow.meeting.links:
                if link not in reached:
                    reached.add(link)
                    more = [other for other in self._on[link] if other not in found]
                    found.update(dict.fromkeys(more))
                    todo += more
        return todo
