"""The simulator's answer for a step on this machine's processor: recorded by a CPU's tape, priced, played."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sim.cost.figures import Figure, Figures
from sim.cost.host import HostForm
from sim.cost.measured import MeasuredTable, Timing
from sim.cost.model import CostModel
from sim.engine.allocated import sum_memory
from sim.engine.play import play
from sim.program.kernels import Operator
from sim.program.program import Mark, Program, Row
from sim.runtime.cpu import CpuRecorder, CpuTape
from sim.runtime.lower import lower
from sim.runtime.recorded import recorded
from sim.runtime.train import TrainingRun
from sim.scenario.setup import Setup
from sim.timeline.lanes import make_lanes
from sim.timeline.metrics import step_time

MACHINE = "this machine"
STEPS = 3
"""The last is steady: optimizer states come in the first."""
ENDLESS_BYTES = 1 << 50

OperatorTimes = Mapping[Operator, float]
"""ns of one launch."""


@dataclass(frozen=True, slots=True)
class HostCosts:
    """What the framework spends apart from kernels, in us: on an operator (or view, or node of a backward), each time a
    region is entered, on an operator that a selective policy sees, on a parameter of the optimizer's loop."""

    operator_us: float = 0.0
    checkpoint_region_us: float = 0.0
    selective_policy_us: float = 0.0
    optimizer_loop_us: float = 0.0

    def form(self) -> HostForm:
        """As the cost model takes it; kernels' own host time is in their measured times."""
        work = {f"work.{name}": getattr(self, name) for name in self.__slots__}
        none = dict.fromkeys(("launch_us", "collective_us", "event_us", "work.data_us"), 0.0)
        figures = {name: Figure(value, "measured", MACHINE) for name, value in {**none, **work}.items()}
        return HostForm(MACHINE, "a training thread on this machine's processor", Figures("host", figures))


def program_of(setup: Setup) -> Program:
    """Whole training steps as a CPU runs them."""
    recorder = CpuRecorder()
    return recorded(TrainingRun(setup, recorder, tape=CpuTape(recorder)), STEPS, stamps=False)


def predicted_ns(setup: Setup, program: Program, times: OperatorTimes, host: HostCosts) -> float:
    """Time of a steady step. Raises CostError for an operator without a time."""
    base = CostModel.for_gpu(setup.cluster.gpu, framework="none")
    table = MeasuredTable.of((work.name, work, Timing(round(ns))) for work, ns in times.items())
    cost = replace(base, host=host.form(), profile=replace(base.profile, name=MACHINE, measured=table))
    lowered = lower([program], cost, setup.mesh)
    return step_time(make_lanes(program, lowered.world, play(lowered.world), lowered.entries[0], 0)).step_ns


def predicted_peak_bytes(program: Program) -> int:
    """Of the steady step, over what is there as it begins."""
    live = sum_memory(program, ENDLESS_BYTES, block_bytes=1).allocated_bytes
    begin, end = (
        mark.memory_events for mark in program.marks if mark.name in (f"s{STEPS - 2}.end", f"s{STEPS - 1}.end")
    )
    return int(live[begin:end].max() - live[begin - 1])


def launches(program: Program) -> Counter[Operator]:
    """How often the steady step runs each operator."""
    ran = (program.kernels[number].work for number in _steady(program, Row.LAUNCH))
    return Counter(work for work in ran if isinstance(work, Operator))


def host_work(program: Program) -> Counter[str]:
    """How often the steady step does each piece of host work."""
    counted: Counter[str] = Counter()
    for number in _steady(program, Row.HOST):
        work = program.host_works[number]
        counted[work.name] += work.count
    return counted


def _steady(program: Program, kind: Row) -> list[int]:
    """Arguments of the steady step's rows of a kind."""
    begin, end = (mark.rows for mark in _borders(program))
    chosen = program.row_kind[begin:end] == kind
    arguments: list[int] = program.row_argument[begin:end][chosen].tolist()
    return arguments


def _borders(program: Program) -> list[Mark]:
    """Where the steady step begins and ends."""
    return [mark for mark in program.marks if mark.name in (f"s{STEPS - 2}.end", f"s{STEPS - 1}.end")]
