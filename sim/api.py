"""load, simulate, Result: the one path that every command and notebook takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from sim.cost.model import CostModel
from sim.engine.memory import play_memory
from sim.engine.play import play
from sim.model.config import ChainConfig
from sim.program.program import Owner, Program
from sim.runtime.lower import HostCall, lower
from sim.runtime.record import record
from sim.scenario import load_scenario
from sim.scenario.setup import Scenario, Setup
from sim.timeline.copies import Copies, copies_of, host_peak_bytes
from sim.timeline.lanes import Lanes, make_lanes
from sim.timeline.memory import MemoryTimeline, Peak
from sim.timeline.metrics import (
    StepMemory,
    StepTime,
    Utilization,
    active_peak,
    outside_bytes,
    step_memory,
    step_time,
    utilization,
)
from sim.timeline.spread import step_sigma
from sim.timeline.stories import Story, stories

UNLIMITED_BYTES = 1 << 50
STEPS = 2  # optimizer states appear in the first, fragmentation from the second on; a third repeats the second

_DRIVER_COST = {
    "segment_alloc": ("cuda_malloc", False),
    "segment_free": ("cuda_free", True),
    "segment_map": ("map", False),
    "segment_unmap": ("unmap", True),
    "flush": ("synchronize", True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One strategy, played: timelines and figures.

    memory: as on the device, ending in an out-of-memory where it does not fit; unlimited: the same with memory without
    end, equal to `memory` where it fits. Times are None where the run did not get through a steady step.
    """

    setup: Setup
    program: Program
    memory: MemoryTimeline
    unlimited: MemoryTimeline
    lanes: Lanes | None
    steady: StepMemory
    first_step: StepMemory
    peak: Peak
    owners: dict[Owner, int]
    time: StepTime | None
    utilization: Utilization | None
    copies: Copies | None
    """Copies between GPU and host; None without any, and where there are no times."""
    host_peak_bytes: int
    """Host memory of one rank at its peak, for what its GPU does not hold."""
    step_sigma: float | None
    """Relative sigma of the step time, from the spread of the sources behind the cost profile."""

    @property
    def name(self) -> str:
        return self.setup.name

    def story(self, path: str, step: int = -1) -> list[Story]:
        """Lives of what is allocated under a module path, e.g. "layers.7.feed_forward.w2", in a step (-1: the last)."""
        return stories(self.memory, path, step)

    @property
    def fits(self) -> bool:
        return self.memory.out_of_memory is None

    @property
    def capacity_bytes(self) -> int:
        """What PyTorch's allocator can get: usable device memory less context and communicators."""
        return self.setup.cluster.usable_memory_bytes - outside_bytes(self.setup)

    @property
    def node_host_bytes(self) -> int:
        """Host memory of all ranks of a node, at the peak."""
        return self.host_peak_bytes * min(self.setup.cluster.gpus_per_node, self.setup.mesh.size)

    @property
    def fits_host(self) -> bool:
        """Is the node's main memory large enough for that? (What else runs there is not counted.)"""
        return self.node_host_bytes <= self.setup.cluster.host_memory_bytes

    @property
    def headroom_bytes(self) -> int:
        """Usable device bytes less the steady peak of device use (negative: so much is missing)."""
        return self.setup.cluster.usable_memory_bytes - self.steady.device_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A scenario with one outcome per strategy, in the scenario's order."""

    scenario: Scenario
    outcomes: tuple[Outcome, ...]

    def story(self, path: str, step: int = -1) -> dict[str, list[Story]]:
        """`Outcome.story` of every strategy, by its name."""
        return {outcome.name: outcome.story(path, step) for outcome in self.outcomes}

    def __getitem__(self, name: str) -> Outcome:
        """The outcome of the strategy called `name`. Raises KeyError."""
        for outcome in self.outcomes:
            if outcome.name == name:
                return outcome
        raise KeyError(name)


def load(path: str | Path, overrides: Iterable[str] = ()) -> Scenario:
    """Read and check a scenario file; `overrides` are "path=value". Raises ScenarioError with every problem."""
    return load_scenario(Path(path), tuple(overrides))


def simulate(scenario: Scenario | str | Path, progress: Callable[[str], None] | None = None) -> Result:
    """Play every strategy of a scenario (or of the file at a path). `progress` is told each strategy's name before."""
    if not isinstance(scenario, Scenario):
        scenario = load(scenario)
    outcomes = []
    for setup in scenario.strategies:
        if progress is not None:
            progress(setup.name)
        outcomes.append(simulate_setup(setup))
    return Result(scenario=scenario, outcomes=tuple(outcomes))


def simulate_setup(setup: Setup) -> Outcome:
    """Play one strategy."""
    program = record(setup, STEPS)
    memory, unlimited = fit_memory(setup, program)
    lanes = play_time(setup, program, memory) if memory.out_of_memory is None else None
    outside = outside_bytes(setup)
    shown = memory if memory.out_of_memory is None else unlimited
    found, owners = active_peak(shown)
    time = step_time(lanes) if lanes is not None else None
    return Outcome(
        setup=setup,
        program=program,
        memory=memory,
        unlimited=unlimited,
        lanes=lanes,
        steady=step_memory(shown, -1, outside),
        first_step=step_memory(shown, 0, outside),
        peak=found,
        owners=owners,
        time=time,
        utilization=utilization(setup, time) if time is not None else None,
        copies=copies_of(lanes) if lanes is not None and time is not None else None,
        host_peak_bytes=host_peak_bytes(program),
        step_sigma=step_sigma(lanes, cost_model(setup), time.step_ns)
        if lanes is not None and time is not None
        else None,
    )


def fit_memory(setup: Setup, program: Program) -> tuple[MemoryTimeline, MemoryTimeline]:
    """The program's memory on the device, and with memory without end (the same object where it fits unhindered)."""
    on_device = device_memory(setup, program)
    if on_device.out_of_memory is None and not any(action == "flush" for _, action, _ in on_device.driver_calls):
        return on_device, on_device
    total = setup.cluster.usable_memory_bytes
    return on_device, play_memory(program, setup.allocator, total, UNLIMITED_BYTES, setup.torch)


def device_memory(setup: Setup, program: Program) -> MemoryTimeline:
    """The program's memory on the device, until its end or an out-of-memory."""
    total = setup.cluster.usable_memory_bytes
    capacity = max(total - outside_bytes(setup), 0)
    return play_memory(program, setup.allocator, total, capacity, setup.torch)


def cost_model(setup: Setup) -> CostModel:
    """Prices for a set-up's GPU, profile, framework and network."""
    cluster = setup.cluster
    framework = "none" if isinstance(setup.model, ChainConfig) else setup.host.framework
    return CostModel.for_gpu(
        cluster.gpu, setup.profile, framework, cluster.network_bytes_per_s, gemm_efficiency=setup.gemm_efficiency
    )


def play_time(setup: Setup, program: Program, memory: MemoryTimeline) -> Lanes:
    """When everything ran, with the driver calls that `memory` made; with unlimited memory: when it would run."""
    cost = cost_model(setup)
    calls = []
    for event, action, _ in memory.driver_calls:
        kind, waits = _DRIVER_COST[action]
        calls.append(HostCall(event, cost.driver_call_ns(kind), waits))
    lowered = lower(program, cost, setup.mesh, calls)
    return make_lanes(program, lowered.world, play(lowered.world), lowered.entry_of_row)
