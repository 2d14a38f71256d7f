"""A calibration from begin to end: what to measure, in which order, within the time that the user gives.

The scenario's shapes first, then figures of host and memory, then the covering designs, families in turn. Every point
is on disk before the next is measured, so that Ctrl-C and the end of the budget lose nothing, and a second run goes on.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from typing import Any, Protocol

from calibration.measure import ranks
from calibration.measure.case import SCENARIO, Case, Reading
from calibration.measure.device import Device
from calibration.measure.points import Points, TimedPoint, read_off, timed
from calibration.measure.timing import Call, Policy, measure
from sim.program.kernels import Attention, Collective, Gemm

SHARE_FOR_ONE = 0.25
"""Of the whole budget, at most, for a single case."""
SHARE_OF_MEMORY = 0.8
LEAST_CASE_S, MOST_CASE_S = 0.02, 0.4
FIRST_RATES = {"cpu": (20e9, 4e9), "cuda": (50e12, 500e9)}
"""FLOP/s and bytes/s from which the first cases' times are guessed."""
LEAST_LESSON_S = 2e-4
"""A case that the first rates guess to be shorter teaches no rate: its time is mostly what starting it takes."""
HOT_BELOW_BYTES = 256 << 20
"""Work that moves more finds nothing of its own in any cache."""
STATE_EVERY_S = 2.0


class Progress(Protocol):
    """Who is told how far it is."""

    def start(self, total: int) -> None: ...

    def step(self, title: str) -> None: ...


class Quiet:
    def start(self, total: int) -> None:
        """Nobody looks."""

    def step(self, title: str) -> None:
        """Nobody looks."""


@dataclass(slots=True)
class Plan:
    """What is to be measured, in order."""

    entries: list[Case | Reading]
    left_out: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """What came of it. `left_out`: what was not measured, and why."""

    measured: int = 0
    known: int = 0
    left_out: list[str] = field(default_factory=list)
    out_of_time: int = 0
    """Cases for which no time was left."""
    interrupted: bool = False
    seconds: float = 0.0


def plan(scenario: Iterable[Case], designs: Sequence[Sequence[Case]], readings: Iterable[Reading]) -> Plan:
    """The scenario's cases, then readings, then the designs, one of each family in turn; nothing twice."""
    in_turn = (case for row in zip_longest(*designs) for case in row if case is not None)
    entries: dict[str, Case | Reading] = {}
    for entry in chain(scenario, readings, in_turn):
        entries.setdefault(entry.key, entry)
    return Plan(list(entries.values()))


def run(
    device: Device,
    planned: Plan,
    points: Points,
    minutes: float,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Measure what the file does not hold yet, until the minutes are over; Ctrl-C ends it the same way."""
    report = Report(left_out=list(planned.left_out))
    known = ranks.agreed({entry.key for entry in planned.entries if entry.key in points})
    todo = [entry for entry in planned.entries if entry.key not in known]
    report.known = len(planned.entries) - len(todo)
    progress = progress or Quiet()
    progress.start(len(todo))
    campaign = _Campaign(device, points, report, clock, minutes * 60)
    try:
        for number, entry in enumerate(todo):
            if campaign.left_s() <= 0:
                report.out_of_time = len(todo) - number
                break
            progress.step(entry.title)
            campaign.one(entry, len(todo) - number)
    except KeyboardInterrupt:
        report.interrupted = True
    report.seconds = clock() - campaign.begin
    return report


class _Campaign:
    """One run under way."""

    def __init__(
        self, device: Device, points: Points, report: Report, clock: Callable[[], float], budget_s: float
    ) -> None:
        self.device, self.points, self.report, self.clock = device, points, report, clock
        self.budget_s, self.begin = budget_s, clock()
        self.seen: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        self.state: dict[str, float] = {}
        self.asked: set[str] = set()
        self.state_at = -STATE_EVERY_S

    def left_s(self) -> float:
        """The same on every rank."""
        return float(ranks.agreed(self.budget_s - (self.clock() - self.begin)))

    def one(self, entry: Case | Reading, remaining: int) -> None:
        """Measure one case or figure; what cannot be, is noted with its reason."""
        if isinstance(entry, Case) and (reason := self._too_large(entry)):
            self.report.left_out.append(f"{entry.title}: {reason}")
            return
        try:
            if isinstance(entry, Reading):
                value = entry.read(self.device)
                if value is None:
                    return
                self.points.add(read_off(entry, value))
            else:
                self.points.add(self._timed(entry, remaining))
        except (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError) as error:
            self.report.left_out.append(f"{entry.title}: {_first_line(error)}")
            return
        self.report.measured += 1

    def _timed(self, case: Case, remaining: int) -> TimedPoint:
        share_s = self.left_s() / remaining / 2
        policy = Policy(case_s=min(max(share_s, LEAST_CASE_S), MOST_CASE_S))
        policy = replace(policy, warm_up_s=policy.case_s / 8)
        call = case.build(self.device)
        measured = ranks.slowest(measure(self.device, call, policy, ranks.agreed))
        hot = None
        if self.device.name == "cpu" and case.work.bytes < HOT_BELOW_BYTES:
            self.device.cold = False
            try:
                hot = ranks.slowest(measure(self.device, case.build(self.device), policy, ranks.agreed))
            finally:
                self.device.cold = True
        self._learn(case, measured.median_ns)
        names = self._kernels(case, call)
        return timed(case, measured, hot, **self._state(), **({"kernels": names} if names else {}))

    def _kernels(self, case: Case, call: Call) -> list[str]:
        """What really ran: a library chooses among kernels by shape for products and attention, else it is asked once."""
        if not isinstance(case.work, Gemm | Attention):
            if case.name in self.asked or isinstance(case.work, Collective):
                return []
            self.asked.add(case.name)
        return self.device.kernels(call)

    def _too_large(self, case: Case) -> str:
        """Why a case cannot be measured here; "" if it can."""
        free = ranks.agreed(self.device.free_bytes())
        if case.bytes_needed > free * SHARE_OF_MEMORY:
            return f"needs {case.bytes_needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
        rounds = Policy().least_rounds + 1
        seconds = rounds * self._guess_s(case) * (2 if self.device.name == "cpu" else 1)
        if seconds > self.budget_s * SHARE_FOR_ONE or seconds > 2 * self.left_s():
            return f"would take about {seconds:.0f} s of the {self.budget_s:.0f} s given"
        return ""

    def _guess_s(self, case: Case) -> float:
        """Time of one call by the family's best rates so far."""
        first = FIRST_RATES[self.device.name]
        flops_per_s, bytes_per_s = (seen or start for seen, start in zip(self.seen[case.family], first))
        return _seconds(case, flops_per_s, bytes_per_s)

    def _learn(self, case: Case, ns: float) -> None:
        """The family's rates, for the next guess: the best so far, since small work and neighbours only slow it down."""
        if _seconds(case, *FIRST_RATES[self.device.name]) < LEAST_LESSON_S:
            return
        seen = self.seen[case.family]
        flops = getattr(case.work, "flops", 0)
        self.seen[case.family] = (max(seen[0], flops / ns * 1e9), max(seen[1], case.work.bytes / ns * 1e9))

    def _state(self) -> dict[str, Any]:
        """Clock and power, asked for every few seconds."""
        if self.clock() - self.state_at >= STATE_EVERY_S:
            self.state, self.state_at = self.device.state(), self.clock()
        return dict(self.state)


def _seconds(case: Case, flops_per_s: float, bytes_per_s: float) -> float:
    return float(max(getattr(case.work, "flops", 0) / flops_per_s, case.work.bytes / bytes_per_s))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def of_scenario(points: Iterable[Any]) -> int:
    """How many points are of a scenario's shapes."""
    return sum(isinstance(point, TimedPoint) and point.origin == SCENARIO for point in points)
