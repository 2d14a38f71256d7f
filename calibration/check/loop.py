"""The loop on a processor: measure operators and the framework, predict steps, run them for real, compare."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from calibration.check.clock import prepare, spread, typical
from calibration.check.host import learn
from calibration.check.kept import Kept
from calibration.check.outcome import Line, Outcome
from calibration.check.peaks import peak_bytes
from calibration.check.plan import (
    BATCHES,
    FAMILIES,
    LEARNT_BATCH,
    LEARNT_FROM,
    PLAIN,
    SHORT,
    SHORT_BATCHES,
    WHOLE,
    strategies_of,
)
from calibration.check.pool import Pool
from calibration.check.predict import HostCosts, predicted_ns, predicted_peak_bytes
from calibration.check.rounds import AGAIN, LOOP_KEY, Group, make_pool, time_loop
from calibration.measure.device import CpuDevice

WHOLE_ROUNDS, SHORT_ROUNDS = 20, 3
LEARNT_A_ROUND = 2
"""Rounds of the networks that host costs are learnt from, to one of those that are checked: they are short."""
PEAK = "peak bytes: "

Tell = Callable[[str, int, int], None]
"""What is done now, rounds done, rounds in all."""


@dataclass(frozen=True, slots=True)
class Request:
    """`short`: smaller networks and few rounds, so that bytes and machinery are tested and times only seen."""

    short: bool = False
    minutes: float = 5.0
    threads: int = 1
    keep: Path | None = None


def silent(_: str, __: int, ___: int) -> None:
    """Nobody looks."""


def check_cpu(request: Request, tell: Tell = silent) -> Outcome:
    """Rounds until there are enough or the minutes are over; Ctrl-C ends them the same way, and what was measured counts.

    Raises ValueError for a file of earlier rounds that does not fit, KeyboardInterrupt before the first round's end.
    """
    prepare(request.threads)
    shapes, batches = (SHORT, SHORT_BATCHES) if request.short else (WHOLE, BATCHES)
    rounds = SHORT_ROUNDS if request.short else WHOLE_ROUNDS
    info = CpuDevice(request.threads).info()
    machine: dict[str, object] = {
        "device": info.title, "torch": info.torch, "threads": request.threads, "shapes": asdict(shapes),
    }  # fmt: skip
    kept = Kept(request.keep, machine)
    learnt = [Group(f"{f} (learnt)", strategies_of(f, LEARNT_FROM, LEARNT_BATCH), kept) for f in FAMILIES]
    checked = {(f, b): Group(f"{f}, batch {b}", strategies_of(f, shapes, b), kept) for f in FAMILIES for b in batches}
    loop = _Loop(learnt, list(checked.values()), kept, tell)
    finished = loop.run(rounds, time.monotonic() + request.minutes * 60)
    host = learn(learnt)
    lines = [line for (family, batch), group in checked.items() for line in _lines(family, batch, group, host)]
    done = min(group.rounds for group in checked.values())
    return Outcome(machine=machine, rounds=done, lines=lines, host=asdict(host), finished=finished)


@dataclass(slots=True)
class _Loop:
    learnt: list[Group]
    checked: list[Group]
    kept: Kept
    tell: Tell

    def run(self, rounds: int, deadline: float) -> bool:
        """Whether all rounds were measured."""
        groups = [*self.learnt, *self.checked]
        done = min(group.rounds for group in groups)
        if done >= rounds and all(self._has_peaks(group) for group in self.checked):
            return True
        pool = make_pool()
        for group in groups:
            self.tell(f"building {group.name}", done, rounds)
            group.start()
            if group in self.checked:
                self._peaks(group)
        try:
            while done < rounds and (time.monotonic() < deadline or not done):
                self._round(pool, done, rounds)
                done += 1
        except KeyboardInterrupt:
            if not min(group.rounds for group in groups):
                raise
        finally:
            for group in groups:
                group.end()
        return done >= rounds

    def _round(self, pool: Pool, done: int, rounds: int) -> None:
        for group in self.learnt:
            self.tell(f"round {done + 1}: {group.name}", done, rounds)
            for _ in range(LEARNT_A_ROUND):
                group.round(pool)
        self.kept.add({LOOP_KEY: time_loop()})
        for group in self.checked:
            self.tell(f"round {done + 1}: {group.name}", done, rounds)
            group.round(pool)

    def _has_peaks(self, group: Group) -> bool:
        return all(self.kept.samples[PEAK + group.key(setup.name)] for setup in group.setups)

    def _peaks(self, group: Group) -> None:
        for setup in group.setups:
            key = PEAK + group.key(setup.name)
            if not self.kept.samples[key]:
                self.kept.add({key: [peak_bytes(group.steps[setup.name])]})


def _lines(family: str, batch: int, group: Group, host: HostCosts) -> list[Line]:
    times = group.operator_ns()
    found: list[Line] = []
    plain_predicted = plain_measured = 0.0
    for setup in (*group.setups, group.setups[0]):
        control = bool(found) and setup.name == PLAIN
        name = AGAIN if control else setup.name
        program = group.programs[setup.name]
        samples = group.step_ns(name)
        predicted, measured = predicted_ns(setup, program, times, host), typical(samples)
        if not found:
            plain_predicted, plain_measured = predicted, measured
        found.append(
            Line(
                network=family,
                batch=batch,
                strategy=name,
                predicted_ns=predicted,
                measured_ns=measured,
                spread=spread(samples),
                predicted_slowdown=predicted / plain_predicted,
                measured_slowdown=measured / plain_measured,
                predicted_peak_bytes=predicted_peak_bytes(program),
                measured_peak_bytes=int(group.kept.samples[PEAK + group.key(setup.name)][0]),
                control=control,
            )
        )
    return found
