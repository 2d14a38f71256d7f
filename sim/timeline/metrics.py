"""The figures that people compare, from one strategy's timelines. Names are the field's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sim.model.config import ModelConfig
from sim.model.flops import model_flops_per_sequence
from sim.program.program import Owner, Phase, Row
from sim.scenario.setup import Setup
from sim.timeline.clock import step_windows
from sim.timeline.lanes import Bools, Lanes
from sim.timeline.memory import MemoryTimeline, Peak, peak, step_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Peaks of one step on the worst rank. `device_bytes` adds what lies outside PyTorch (context, communicators)."""

    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    device_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Times and counts of the steady step of one rank, in nanoseconds.

    exposed_communication_ns: a collective runs and the compute stream does not. recompute_of_forward: recomputed kernel
    time over the forward's; recompute_of_step: over the step without it.
    """

    step_ns: float
    first_step_ns: float
    forward_ns: float
    backward_ns: float
    recompute_ns: float
    exposed_communication_ns: float
    host_bound_ns: float
    """Compute is idle, nothing moves: the host (or a wait for it) is what the step waits for."""
    waits_for_stages_ns: float
    """Compute is idle until another pipeline stage hands something on."""
    collectives: dict[str, int]
    flops: int
    recomputed_flops: int

    @property
    def recompute_of_forward(self) -> float:
        return self.recompute_ns / self.forward_ns if self.forward_ns else 0.0

    @property
    def recompute_of_step(self) -> float:
        rest = self.step_ns - self.recompute_ns
        return self.recompute_ns / rest if rest > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilization:
    """MFU and HFU as fractions of the dense peak of the compute dtype; formula: sim.model.flops.MFU_FORMULA.

    HFU counts recomputed FLOPs too: MFU times (executed / needed) FLOPs of the kernels.
    """

    tokens_per_s_per_gpu: float
    samples_per_s_per_gpu: float
    """Sequences, or images."""
    mfu: float
    hfu: float


def outside_bytes(setup: Setup) -> int:
    """Device memory outside PyTorch's allocator: the CUDA context and one communicator per group of ranks."""
    cluster, fsdp = setup.cluster, setup.fsdp or setup.fsdp1
    groups = 0 if fsdp is None else (fsdp.degree > 1) + (fsdp.replicas > 1)
    groups += (setup.tensor.degree > 1) + (setup.data is not None and setup.data.degree > 1)
    groups += (setup.stages > 1) + (setup.context.degree > 1)
    groups += (setup.expert.degree > 1) + (setup.expert.tensor > 1 and setup.expert.degree > 1)
    replicated = setup.ddp or setup.zero
    groups += replicated is not None and replicated.degree > 1
    return cluster.context_bytes + groups * cluster.communicator_bytes


def step_memory(memory: MemoryTimeline, step: int, outside: int) -> StepMemory:
    """Peaks of a step (0 = first, -1 = last begun)."""
    first, last = memory.steps()[step]
    reserved = peak(memory, memory.reserved_bytes, first, last).bytes
    return StepMemory(
        allocated_bytes=peak(memory, memory.allocated_bytes, first, last).bytes,
        active_bytes=peak(memory, memory.active_bytes, first, last).bytes,
        reserved_bytes=reserved,
        device_bytes=reserved + outside,
    )


def steady_memory(memory: MemoryTimeline, period: int, outside: int) -> StepMemory:
    """Largest peaks of the last `period` steps: the cycle that repeats."""
    steps = [step_memory(memory, -1 - back, outside) for back in range(min(period, len(memory.steps())))]
    return StepMemory(
        allocated_bytes=max(step.allocated_bytes for step in steps),
        active_bytes=max(step.active_bytes for step in steps),
        reserved_bytes=max(step.reserved_bytes for step in steps),
        device_bytes=max(step.device_bytes for step in steps),
    )


def active_peak(memory: MemoryTimeline) -> tuple[Peak, dict[Owner, int]]:
    """The peak of active bytes in the last begun step, and the owners then."""
    first, last = memory.steps()[-1]
    found = peak(memory, memory.active_bytes, first, last)
    return found, memory.owners_at(found.event)


def step_time(lanes: Lanes, period: int = 1) -> StepTime:
    """Times of the steady (last) step; where a cycle of `period` steps repeats, step_ns is its mean."""
    program = lanes.program
    ranges = step_ranges([(m.name, m.rows) for m in program.marks], len(lanes.start_ns))
    windows = step_windows(lanes)
    rows = lanes.in_step(*ranges[-1])
    cycle = windows[-period:]
    step_ns = (cycle[-1][1] - cycle[0][0]) / len(cycle)
    recompute = lanes.kernel_ns(rows, Phase.RECOMPUTE)
    exposed = lanes.exposed_ns(rows & (lanes.is_transfer | lanes.computes))
    moving = lanes.exposed_ns(rows & (lanes.is_transfer | lanes.is_copy | lanes.computes))
    busy = lanes.busy_ns(rows & lanes.computes)
    waits = lanes.waits_for_stages_ns(rows)
    flops, again = _flops(lanes, rows)
    return StepTime(
        step_ns=step_ns,
        first_step_ns=windows[0][1] - windows[0][0],
        forward_ns=lanes.kernel_ns(rows, Phase.FORWARD) + lanes.kernel_ns(rows, Phase.LOSS),
        backward_ns=lanes.kernel_ns(rows, Phase.BACKWARD),
        recompute_ns=recompute,
        exposed_communication_ns=exposed,
        host_bound_ns=max(0.0, step_ns - busy - moving - waits),
        waits_for_stages_ns=waits,
        collectives=_collectives(lanes, rows),
        flops=flops,
        recomputed_flops=again,
    )


def bubble_fraction(ranks: Sequence[Lanes]) -> float:
    """Idle over busy time of all pipeline ranks' compute streams in the steady step, which lasts as long as the slowest.

    (p - 1) / m for p equal stages and m micro-batches under GPipe and 1F1B, (p - 1) / (v m) interleaved (Narayanan et
    al. 2021).
    """
    step_ns = busy_ns = 0.0
    for lanes in ranks:
        first, last = step_ranges([(m.name, m.rows) for m in lanes.program.marks], len(lanes.start_ns))[-1]
        begin_ns, end_ns = step_windows(lanes)[-1]
        step_ns = max(step_ns, end_ns - begin_ns)
        busy_ns += lanes.busy_ns(lanes.in_step(first, last) & lanes.computes)
    return (len(ranks) * step_ns - busy_ns) / busy_ns if busy_ns else 0.0


def _flops(lanes: Lanes, rows: Bools) -> tuple[int, int]:
    """Executed FLOPs of matrix products and attention among `rows`: all, and those of recomputation."""
    program = lanes.program
    kernels = rows & lanes.is_kernel
    executed: Counter[tuple[int, bool]] = Counter(
        zip(program.row_argument[kernels].tolist(), (lanes.phase[kernels] == Phase.RECOMPUTE).tolist())
    )
    amounts = [(program.kernels[k].work.flops * n, again) for (k, again), n in executed.items()]
    return sum(f for f, _ in amounts), sum(f for f, again in amounts if again)


def _collectives(lanes: Lanes, rows: Bools) -> dict[str, int]:
    program = lanes.program
    chosen = rows & (program.row_kind == Row.COLLECTIVE)
    return dict(Counter(program.collectives[i].kind for i in program.row_argument[chosen].tolist()))


def utilization(setup: Setup, time: StepTime) -> Utilization | None:
    """Throughput of one GPU; None for the chain, which has no tokens."""
    if not isinstance(setup.model, ModelConfig):
        return None
    batch = setup.batch
    sequences = batch.micro_batch * batch.accumulation
    sharers = setup.stages * setup.tensor.degree * setup.context.degree
    per_second = sequences / sharers / (time.step_ns * 1e-9)
    peak_flops = setup.cluster.gpu.peak_flops_per_s(setup.precision.compute)
    per_sequence = model_flops_per_sequence(setup.model, batch.seq_len, batch.target_len)
    if setup.mode != "train":
        per_sequence //= 3  # a forward alone
    mfu = per_sequence * per_second / peak_flops
    needed = time.flops - time.recomputed_flops
    hfu = mfu * time.flops / needed if needed else mfu
    return Utilization(
        tokens_per_s_per_gpu=per_second * batch.tokens_per_sequence, samples_per_s_per_gpu=per_second, mfu=mfu, hfu=hfu
    )
