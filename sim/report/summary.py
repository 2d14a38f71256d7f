"""The figures of a run as plain data: what the console prints, what `--json` writes (docs/json.md explains every key).

Field names are the keys of the JSON; `None` is null: no such figure, or the run did not get so far.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from sim import __version__
from sim.api import Outcome
from sim.model.config import ChainConfig
from sim.model.flops import MFU_FORMULA
from sim.plan.micro_batch import LARGEST_CONSIDERED
from sim.report.evidence import Evidence, evidence
from sim.report.levers import Lever, find_lever
from sim.report.notes import between, notes
from sim.report.offload_summary import OffloadSummary, summarize_offload
from sim.report.parameter_bytes import bytes_per_parameter
from sim.scenario.setup import Scenario, Setup
from sim.timeline.clock import step_windows
from sim.timeline.memory import MemoryTimeline
from sim.timeline.metrics import outside_bytes

AWAITING_STREAM = "freed, awaited by a stream"
"""Owner of bytes that no tensor holds and that cannot be reused yet: active less allocated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """The step that creates optimizer states and fills the allocator's cache."""

    step_time_s: float | None
    peak_allocated_bytes: int
    peak_active_bytes: int
    peak_reserved_bytes: int
    peak_device_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakOfActive:
    """Where the steady step's peak of active bytes is; `owners` (largest first) sum to it."""

    phase: str
    layer: str
    op: str
    owners: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeOverhead:
    """Recomputed kernel time over that of the forward, and over a step without it."""

    of_forward: float
    of_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """The allocation that failed, with what PyTorch's message would say and who held memory then.

    `step` counts from 0; -1 is the set-up before the first.
    """

    step: int
    phase: str
    layer: str
    op: str
    requested_bytes: int
    tried_bytes: int
    device_free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    alive: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """One rank of a pipeline, in the steady step. `stages`: numbers of those that it holds; `layers` in each of them.

    in_flight: most micro-batches (of any of its stages) between forward and backward (its weights) at once.
    """

    name: str
    stages: tuple[int, ...]
    layers: tuple[int, ...]
    in_flight: int
    peak_allocated_bytes: int
    peak_active_bytes: int
    peak_reserved_bytes: int
    peak_device_bytes: int
    waits_for_stages_s: float | None
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySummary:
    """One strategy. Peaks are those of the steady step, or what it would need where it does not fit."""

    name: str
    tokens_per_step: int | None
    step_time_s: float | None
    step_time_relative_sigma: float | None
    steady_cycle_steps: int
    steady_is_settled: bool
    steady_step_start_s: float | None
    tokens_per_s_per_gpu: float | None
    samples_per_s_per_gpu: float | None
    mfu: float | None
    hfu: float | None
    peak_allocated_bytes: int
    peak_active_bytes: int
    peak_reserved_bytes: int
    peak_device_bytes: int
    first_step: FirstStep
    peak: PeakOfActive
    lever: Lever | None
    notes: tuple[str, ...]
    bytes_per_parameter: dict[str, float]
    exposed_communication_s: float | None
    host_bound_s: float | None
    recompute_overhead: RecomputeOverhead | None
    all_gathers: int | None
    reduce_scatters: int | None
    largest_micro_batch: int | None
    largest_micro_batch_is_lower_bound: bool
    fits: bool
    usable_device_bytes: int
    context_bytes: int
    communicator_bytes: int
    headroom_bytes: int
    oom: OutOfMemory | None
    worst_stage: str | None
    bubble_fraction: float | None
    stages: tuple[StageSummary, ...]
    offload: OffloadSummary | None
    labels: dict[str, Evidence]
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One scenario: the object that `--json` prints, and that every summary.json holds (with one strategy)."""

    sim_version: str
    scenario: str
    overrides: tuple[str, ...]
    description: str
    model: str
    gpu: str
    gpus: int
    mfu_formula: str
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    strategies: tuple[StrategySummary, ...]

    @property
    def title(self) -> str:
        """As Scenario.title."""
        return f"{self.scenario}@{','.join(self.overrides)}" if self.overrides else self.scenario

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, ready for JSON."""
        return asdict(self)


def to_json(summary: RunSummary) -> str:
    """As `--json` prints it and summary.json holds it."""
    return json.dumps(summary.as_dict(), indent=2, ensure_ascii=False)


def summarize_run(scenario: Scenario, strategies: tuple[StrategySummary, ...]) -> RunSummary:
    first = scenario.strategies[0]
    return RunSummary(
        sim_version=__version__,
        scenario=scenario.name,
        overrides=scenario.overrides,
        description=scenario.description,
        model=first.model.name,
        gpu=first.cluster.gpu.name,
        gpus=first.cluster.gpus,
        mfu_formula=MFU_FORMULA,
        warnings=scenario.warnings,
        notes=between(scenario, strategies),
        strategies=strategies,
    )


def summarize(outcome: Outcome, largest_micro_batch: int | None = None) -> StrategySummary:
    """All figures of one strategy."""
    setup, steady, time, use = outcome.setup, outcome.steady, outcome.time, outcome.utilization
    usable = setup.cluster.usable_memory_bytes
    most_device_bytes = max(steady.device_bytes, outcome.first_step.device_bytes)
    return StrategySummary(
        name=outcome.name,
        tokens_per_step=tokens_per_step(setup),
        step_time_s=time.step_ns * 1e-9 if time else None,
        step_time_relative_sigma=outcome.step_sigma,
        steady_cycle_steps=outcome.cycle.period,
        steady_is_settled=outcome.cycle.settled,
        steady_step_start_s=step_windows(outcome.lanes)[-1][0] * 1e-9 if outcome.lanes else None,
        tokens_per_s_per_gpu=use.tokens_per_s_per_gpu if use else None,
        samples_per_s_per_gpu=use.samples_per_s_per_gpu if use else None,
        mfu=use.mfu if use else None,
        hfu=use.hfu if use else None,
        peak_allocated_bytes=steady.allocated_bytes,
        peak_active_bytes=steady.active_bytes,
        peak_reserved_bytes=steady.reserved_bytes,
        peak_device_bytes=steady.device_bytes,
        first_step=_first_step(outcome),
        peak=_peak(outcome),
        lever=find_lever(outcome),
        notes=notes(outcome),
        bytes_per_parameter=bytes_per_parameter(setup),
        exposed_communication_s=time.exposed_communication_ns * 1e-9 if time else None,
        host_bound_s=time.host_bound_ns * 1e-9 if time else None,
        recompute_overhead=(
            RecomputeOverhead(of_forward=time.recompute_of_forward, of_step=time.recompute_of_step) if time else None
        ),
        all_gathers=time.collectives.get("all_gather", 0) if time else None,
        reduce_scatters=time.collectives.get("reduce_scatter", 0) if time else None,
        largest_micro_batch=largest_micro_batch,
        largest_micro_batch_is_lower_bound=largest_micro_batch == LARGEST_CONSIDERED,
        fits=outcome.fits,
        usable_device_bytes=usable,
        context_bytes=setup.cluster.context_bytes,
        communicator_bytes=outside_bytes(setup) - setup.cluster.context_bytes,
        headroom_bytes=usable - most_device_bytes,
        oom=_out_of_memory(outcome.memory),
        worst_stage=outcome.worst.name if setup.pipeline is not None else None,
        bubble_fraction=outcome.bubble_fraction,
        stages=_stages(outcome),
        offload=summarize_offload(outcome),
        labels=evidence(setup),
        fingerprint=fingerprint(setup),
    )


def fingerprint(setup: Setup) -> str:
    """The same for the same set-up played by the same version, so by figures that may stand beside each other."""
    return sha256(f"{__version__} {setup!r}".encode()).hexdigest()[:16]


def tokens_per_step(setup: Setup) -> int | None:
    """Tokens of all ranks in one optimizer step; None for the chain, which has none."""
    if isinstance(setup.model, ChainConfig):
        return None
    batch = setup.batch
    return batch.micro_batch * batch.tokens_per_sequence * batch.accumulation * setup.data_parallel


def _stages(outcome: Outcome) -> tuple[StageSummary, ...]:
    pipeline = outcome.setup.pipeline
    if pipeline is None:
        return ()
    return tuple(
        StageSummary(
            name=rank.name,
            stages=rank.stages,
            layers=tuple(pipeline.placement[stage] for stage in rank.stages),
            in_flight=rank.in_flight,
            peak_allocated_bytes=rank.steady.allocated_bytes,
            peak_active_bytes=rank.steady.active_bytes,
            peak_reserved_bytes=rank.steady.reserved_bytes,
            peak_device_bytes=rank.steady.device_bytes,
            waits_for_stages_s=rank.time.waits_for_stages_ns * 1e-9 if rank.time else None,
            fits=rank.fits,
        )
        for rank in outcome.ranks
    )


def _first_step(outcome: Outcome) -> FirstStep:
    first, time = outcome.first_step, outcome.time
    return FirstStep(
        step_time_s=time.first_step_ns * 1e-9 if time else None,
        peak_allocated_bytes=first.allocated_bytes,
        peak_active_bytes=first.active_bytes,
        peak_reserved_bytes=first.reserved_bytes,
        peak_device_bytes=first.device_bytes,
    )


def _peak(outcome: Outcome) -> PeakOfActive:
    peak = outcome.peak
    owners = {owner.label: size for owner, size in outcome.owners.items()}
    rest = peak.bytes - sum(owners.values())
    if rest > 0:
        owners[AWAITING_STREAM] = rest
    ranked = dict(sorted(owners.items(), key=lambda item: -item[1]))
    return PeakOfActive(phase=peak.phase.name.lower(), layer=peak.path, op=peak.operator, owners=ranked)


def _out_of_memory(memory: MemoryTimeline) -> OutOfMemory | None:
    failure = memory.out_of_memory
    if failure is None:
        return None
    program = memory.program
    phase, layer, op = program.where(int(program.mem_where[failure.event]))
    return OutOfMemory(
        step=len(memory.steps()) - 1,
        phase=phase.name.lower(),
        layer=layer,
        op=op,
        requested_bytes=failure.requested_bytes,
        tried_bytes=failure.driver_bytes,
        device_free_bytes=failure.device_free_bytes,
        allocated_bytes=failure.allocated_bytes,
        reserved_bytes=failure.reserved_bytes,
        alive={owner.label: size for owner, size in memory.owners_at(failure.event - 1).items()},
    )
