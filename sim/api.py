"""load, simulate, Result: the one path that every command and notebook takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sim.cost.model import CostModel
from sim.engine.allocated import sum_memory
from sim.engine.deadlock import DeadlockError, with_transfers_named
from sim.engine.folded import play_folded
from sim.engine.memory import MemoryPlay, play_memory
from sim.engine.play import play
from sim.engine.steady import Cycle, find_cycle
from sim.engine.stream_clock import StreamClock
from sim.model.config import ChainConfig
from sim.program.collector import without_collector
from sim.program.program import Mem, Owner, Program
from sim.runtime.driver_calls import HostCall, host_calls
from sim.runtime.extend import NotPeriodic, cut, extend
from sim.runtime.lower import lower
from sim.runtime.record import record, steps_to_record
from sim.runtime.schedules import in_flight, order, stages_of
from sim.scenario import load_scenario
from sim.scenario.allocator.settings import ALLOCATOR_OFF
from sim.scenario.setup import Scenario, Setup
from sim.timeline.copies import Copies, copies_of, host_peak_bytes
from sim.timeline.lanes import Lanes, make_lanes
from sim.timeline.memory import MemoryTimeline, Peak
from sim.timeline.metrics import (
    StepMemory,
    StepTime,
    Utilization,
    active_peak,
    bubble_fraction,
    outside_bytes,
    steady_memory,
    step_memory,
    step_time,
    utilization,
)
from sim.timeline.spread import step_sigma
from sim.timeline.stories import Story, stories

UNLIMITED_BYTES = 1 << 50
MOST_STEPS = 13
"""So many steps are played to see memory repeat itself. Mostly the fourth does; near the limit a cycle of a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """One simulated rank: the only one without a pipeline. `stages`: numbers of the pipeline stages that it holds.

    in_flight: most micro-batches (of any of its stages) between forward and backward at once, as the schedule has it.
    """

    stages: tuple[int, ...]
    program: Program
    memory: MemoryTimeline
    unlimited: MemoryTimeline
    lanes: Lanes | None
    steady: StepMemory
    first_step: StepMemory
    time: StepTime | None
    in_flight: int

    @property
    def name(self) -> str:
        return f"stage{'s' * (len(self.stages) > 1)} {', '.join(map(str, self.stages))}"

    @property
    def fits(self) -> bool:
        return self.memory.out_of_memory is None

    @property
    def shown(self) -> MemoryTimeline:
        """Memory as on the device, or as it would be where it does not fit."""
        return self.memory if self.fits else self.unlimited


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One strategy, played: timelines and figures.

    memory: as on the device, ending in an out-of-memory where it does not fit; unlimited: the same with memory without
    end, equal to `memory` where it fits. Times are None where the run did not get through a steady step. With a
    pipeline, `ranks` are its ranks; everything else speaks of the one with the largest device use (`worst`), but for the
    step time, which is that of the slowest.
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
    nvme_bytes: int
    """What one rank holds on its node's drives."""
    step_sigma: float | None
    """Relative sigma of the step time, from the spread of the sources behind the cost profile."""
    ranks: tuple[RankOutcome, ...]
    worst: RankOutcome
    bubble_fraction: float | None
    """Idle over busy time of the pipeline's compute streams; None without a pipeline."""
    cycle: Cycle
    """The steps that repeat for ever: the steady step time is their mean, the steady peaks are their largest."""

    @property
    def name(self) -> str:
        return self.setup.name

    def story(self, path: str, step: int = -1) -> list[Story]:
        """Lives of what is allocated under a module path, e.g. "layers.7.feed_forward.w2", in a step (-1: the last)."""
        return stories(self.memory, path, step)

    @property
    def fits(self) -> bool:
        return all(rank.fits for rank in self.ranks)

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
    def node_nvme_bytes(self) -> int:
        """What all ranks of a node hold on its drives."""
        return self.nvme_bytes * min(self.setup.cluster.gpus_per_node, self.setup.mesh.size)

    @property
    def fits_nvme(self) -> bool:
        """Are the node's drives large enough for that?"""
        return self.node_nvme_bytes <= self.setup.cluster.drives.capacity_bytes

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
    with without_collector():
        return _simulated(setup)


def _simulated(setup: Setup) -> Outcome:
    programs, on_device, cycle = settle(setup)
    if has_allocator(setup) and any((program.mem_kind == Mem.RECORD_STREAM).any() for program in programs):
        on_device = wait_for_streams(setup, programs, on_device)
    memories = [fit_memory(setup, memory) for memory in on_device]
    fits = all(memory.out_of_memory is None for memory in on_device)
    lanes = play_time(setup, programs, [memory for memory, _ in memories]) if fits else [None] * len(programs)
    ranks = tuple(map(partial(_rank_outcome, setup, cycle), range(setup.stages), programs, memories, lanes))
    worst = max(ranks, key=lambda rank: (not rank.fits, rank.steady.device_bytes))
    found, owners = active_peak(worst.shown)
    time = _slowest(ranks, worst)
    played = [rank_lanes for rank_lanes in lanes if rank_lanes is not None]
    return Outcome(
        setup=setup,
        program=worst.program,
        memory=worst.memory,
        unlimited=worst.unlimited,
        lanes=worst.lanes,
        steady=worst.steady,
        first_step=worst.first_step,
        peak=found,
        owners=owners,
        time=time,
        utilization=utilization(setup, time) if time is not None else None,
        copies=copies_of(worst.lanes) if worst.lanes is not None and time is not None else None,
        host_peak_bytes=max(host_peak_bytes(program) for program in programs),
        nvme_bytes=max(program.nvme_bytes for program in programs),
        step_sigma=step_sigma(worst.lanes, cost_model(setup), time.step_ns) if worst.lanes and time else None,
        ranks=ranks,
        worst=worst,
        bubble_fraction=bubble_fraction(played) if setup.pipeline is not None and played else None,
        cycle=cycle,
    )


def settle(setup: Setup) -> tuple[list[Program], list[MemoryTimeline], Cycle]:
    """Programs and memory on the device of every rank, as far as a whole steady cycle; or until memory runs out."""
    recorded = [record(setup, steps_to_record(setup), rank=rank) for rank in range(setup.stages)]
    plays = [device_play(setup) for _ in recorded] if has_allocator(setup) else []
    for steps in range(steps_to_record(setup), MOST_STEPS + 1):
        programs = _extended(setup, recorded, steps)
        if plays:
            memories = [play.play(program) for play, program in zip(plays, programs)]
        else:
            memories = [device_memory(setup, program) for program in programs]
        if any(memory.out_of_memory is not None for memory in memories):
            return programs, memories, Cycle(1, 1)
        cycle = find_cycle(memories)
        if cycle is not None:
            recorded.clear()
            for rank, program in enumerate(programs):  # one by one: large runs have no room for all of them twice
                programs[rank] = program = cut(program, cycle.steps)
                memories[rank] = memories[rank].until(program) if plays else device_memory(setup, program)
            return programs, memories, cycle
    return programs, memories, Cycle(1, MOST_STEPS - 1, settled=False)


def wait_for_streams(setup: Setup, programs: list[Program], on_device: list[MemoryTimeline]) -> list[MemoryTimeline]:
    """Memory again, now that a first play tells when streams are through with what others free (record_stream)."""
    unlimited = [fit_memory(setup, memory)[1] for memory in on_device]
    clocks = [StreamClock(lanes) for lanes in play_time(setup, programs, unlimited)]
    return [device_play(setup, clock).play(program) for clock, program in zip(clocks, programs)]


def _extended(setup: Setup, recorded: list[Program], steps: int) -> list[Program]:
    try:
        return [extend(program, steps) for program in recorded]
    except NotPeriodic:
        return [record(setup, steps, rank=rank) for rank in range(setup.stages)]


def _rank_outcome(
    setup: Setup,
    cycle: Cycle,
    rank: int,
    program: Program,
    memory: tuple[MemoryTimeline, MemoryTimeline],
    lanes: Lanes | None,
) -> RankOutcome:
    on_device, unlimited = memory
    shown, outside = unlimited if on_device.out_of_memory is not None else on_device, outside_bytes(setup)
    stages: tuple[int, ...] = (0,)
    flying = 1
    if setup.pipeline is not None:
        pipeline, count = setup.pipeline, setup.batch.accumulation
        stages = tuple(stages_of(rank, pipeline.degree, pipeline.chunks, pipeline.folded))
        actions = order(pipeline.schedule, rank, pipeline.degree, count, pipeline.chunks)
        flying = in_flight(actions, until_weights=pipeline.splits_backward)
    return RankOutcome(
        stages=stages,
        program=program,
        memory=on_device,
        unlimited=unlimited,
        lanes=lanes,
        steady=steady_memory(shown, cycle.period, outside),
        first_step=step_memory(shown, 0, outside),
        time=step_time(lanes, cycle.period) if lanes is not None else None,
        in_flight=flying,
    )


def _slowest(ranks: tuple[RankOutcome, ...], worst: RankOutcome) -> StepTime | None:
    """The times of the worst rank in a step that lasts as long as the slowest rank's."""
    times = [rank.time for rank in ranks if rank.time is not None]
    if worst.time is None:
        return None
    return replace(
        worst.time,
        step_ns=max(time.step_ns for time in times),
        first_step_ns=max(time.first_step_ns for time in times),
    )


def fit_memory(setup: Setup, on_device: MemoryTimeline) -> tuple[MemoryTimeline, MemoryTimeline]:
    """Memory on the device, and with memory without end (the same object where it fits unhindered)."""
    if on_device.out_of_memory is None and not any(action == "flush" for _, action, _ in on_device.driver_calls):
        return on_device, on_device
    if not has_allocator(setup):
        return on_device, sum_memory(on_device.program, UNLIMITED_BYTES)
    total = setup.cluster.usable_memory_bytes
    return on_device, play_memory(on_device.program, setup.allocator, total, UNLIMITED_BYTES, setup.torch)


def device_memory(setup: Setup, program: Program) -> MemoryTimeline:
    """The program's memory on the device, until its end or an out-of-memory."""
    if not has_allocator(setup):
        return sum_memory(program, device_bytes(setup)[1])
    return device_play(setup).play(program)


def has_allocator(setup: Setup) -> bool:
    """Is PyTorch's allocator played? Else only the bytes of tensors are counted."""
    return setup.allocator != ALLOCATOR_OFF


def device_play(setup: Setup, clock: StreamClock | None = None) -> MemoryPlay:
    """Nothing played yet on a rank's device: what is left of it for the driver to give."""
    return MemoryPlay(setup.allocator, *device_bytes(setup), setup.torch, clock)


def device_bytes(setup: Setup) -> tuple[int, int]:
    """Memory of a rank's device as the driver shows it, and how much of that it can give to the allocator."""
    total = setup.cluster.usable_memory_bytes
    return total, max(total - outside_bytes(setup), 0)


def cost_model(setup: Setup) -> CostModel:
    """Prices for a set-up's GPU, profile, framework and network."""
    cluster = setup.cluster
    framework = "none" if isinstance(setup.model, ChainConfig) else setup.host.framework
    return CostModel.for_gpu(
        cluster.gpu,
        setup.profile,
        framework,
        cluster.network_bytes_per_s,
        gemm_efficiency=setup.gemm_efficiency,
        attention_kernel=setup.attention_kernel,
    )


def play_time(setup: Setup, programs: Sequence[Program], memories: Sequence[MemoryTimeline]) -> list[Lanes]:
    """When everything ran, with the driver calls that `memories` made; with unlimited memory: when it would run.

    One program and memory per pipeline rank. Raises DeadlockError when ranks wait for each other.
    """
    cost = cost_model(setup)
    calls = [host_calls(memory.program, memory.driver_calls, cost) for memory in memories]
    return play_folded(programs, calls, partial(play_whole, setup))


def play_whole(setup: Setup, programs: Sequence[Program], calls: Sequence[Sequence[HostCall]]) -> list[Lanes]:
    """The same with every row of the programs played."""
    lowered = lower(programs, cost_model(setup), setup.mesh, calls, setup.cluster.drives, setup.host.launch_blocking)
    try:
        played = play(lowered.world)
    except DeadlockError as error:
        raise with_transfers_named(error, lowered.world, programs) from None
    return [
        make_lanes(program, lowered.world, played, entries, rank)
        for rank, (program, entries) in enumerate(zip(programs, lowered.entries))
    ]


def shown_lanes(outcome: Outcome) -> list[Lanes]:
    """The lanes of every rank; where the strategy does not fit, those that it would have with memory enough."""
    lanes = [rank.lanes for rank in outcome.ranks if rank.lanes is not None]
    if len(lanes) == len(outcome.ranks):
        return lanes
    programs, memories = zip(*((rank.program, rank.unlimited) for rank in outcome.ranks))
    return play_time(outcome.setup, programs, memories)
