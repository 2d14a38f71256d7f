"""How long large pipelines, and many micro-batches, take to play, kernel by kernel, with every stage's memory.

    PYTHONPATH=. python benchmarks/pipeline.py [CASE ...]

    175b       GPT-3 175B, TP 8, PP 8, 64 micro-batches, full allocator on every stage
    175b-v3    the same, interleaved, 3 chunks per rank
    175b-zb    the same with zero-bubble's ZB-H1
    175b-off, 175b-v3-off   the first two with allocated bytes only (`allocator: off`)
    175b-pp    GPT-3 175B without tensor parallelism, full allocator
    1t         scenarios/gpt_1t_pp64.yaml: 64 stages, 512 micro-batches, allocated bytes only
    accumulation       Llama-3.1-8B under FSDP2 over 8 GPUs, 128 micro-batches per step, full allocator
    moe-accumulation   Mixtral-8x7B, TP 8, experts over 8 ranks, 256 micro-batches, full allocator

Default: all but 1t. Per case: CPU seconds on one core of each part and of `simulate_setup` as a whole, kernels of its
steps, and the peak of resident memory so far (so one case per process tells the case's own). Writing the trace is the
last line, but for the last two cases. `--whole`: play every micro-batch, also where most repeat others (`sim.engine.folded`).
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

from sim import api
from sim.program.collector import without_collector
from sim.program.program import Row
from sim.scenario import load_scenario, load_text
from sim.scenario.setup import Setup
from sim.timeline.export.trace import Rank, trace_bytes

SCENARIO = """
model: {{preset: gpt-175b, implementation: {implementation}, tied_embeddings: false, dropout: 0.1}}
cluster: {{gpu: a100-sxm-80gb, gpus_per_node: 8, nodes: {nodes}, usable_memory: 4 TiB}}
batch: {{micro_batch: 1, seq_len: 2048, accumulation: 64}}
precision: {{parameters: fp16, compute: fp16, reduce: fp32}}
parallel: {{{tensor}pipeline: {{degree: 8, {schedule}}}}}
allocator: {allocator}
"""
TENSOR = "tensor: {degree: 8, sequence_parallel: true}, "
INTERLEAVED = "schedule: interleaved, virtual: 3"
CASES = {
    "175b": (TENSOR, "schedule: 1f1b", '""'),
    "175b-v3": (TENSOR, INTERLEAVED, '""'),
    "175b-zb": (TENSOR, "schedule: zb-h1", '""'),
    "175b-off": (TENSOR, "schedule: 1f1b", "off"),
    "175b-v3-off": (TENSOR, INTERLEAVED, "off"),
    "175b-pp": ("", "schedule: 1f1b", '""'),
}
LARGEST = Path(__file__).parents[1] / "scenarios" / "gpt_1t_pp64.yaml"


ACCUMULATION = {
    "accumulation": """
model: {preset: llama-3.1-8b, implementation: torchtitan}
cluster: {gpu: h100-sxm-80gb, gpus_per_node: 8, nodes: 1}
batch: {micro_batch: 1, seq_len: 4096, accumulation: 128}
precision: {parameters: fp32, compute: bf16, reduce: fp32}
parallel: {fsdp: {degree: 8}}
checkpoint: {every: 1}
""",
    "moe-accumulation": """
model: {preset: mixtral-8x7b, implementation: megatron}
cluster: {gpu: h100-sxm-80gb, gpus_per_node: 8, nodes: 8}
batch: {micro_batch: 1, seq_len: 4096, accumulation: 256}
precision: {parameters: bf16, compute: bf16, reduce: fp32}
parallel:
  tensor: {degree: 8, sequence_parallel: true}
  expert: {degree: 8}
  data: {degree: 8, distributed_optimizer: true}
checkpoint: {every: 1}
""",
}


def setup_of(case: str) -> Setup:
    if case == "1t":
        return load_scenario(LARGEST).strategies[0]
    if case in ACCUMULATION:
        return load_text(ACCUMULATION[case], case).strategies[0]
    tensor, schedule, allocator = CASES[case]
    text = SCENARIO.format(
        implementation="megatron" if tensor else "nanogpt", nodes=8 if tensor else 1, tensor=tensor, schedule=schedule,
        allocator=allocator,
    )  # fmt: skip
    return load_text(text, case).strategies[0]


class Clock:
    """Prints the CPU time of each part."""

    def __init__(self) -> None:
        self.last = time.process_time()

    def past(self, part: str, amount: str = "") -> None:
        now = time.process_time()
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
        print(f"  {part:10} {now - self.last:6.2f} s  {resident:5.2f} GiB  {amount}", flush=True)
        self.last = time.process_time()


def parts(setup: Setup) -> None:
    """The parts of `simulate_setup`, one by one."""
    with without_collector():
        clock = Clock()
        programs, memories, cycle = api.settle(setup)
        events = sum(memory.played for memory in memories)
        clock.past("settle", f"record and memory: {events:,} memory events in {cycle.steps} steps")
        lanes = api.play_time(setup, programs, memories)
        clock.past("times", f"start and end of {sum(len(own.start_ns) for own in lanes):,} rows")
        for own in lanes:
            api.step_time(own)
        clock.past("figures", "times of the step")


def main() -> None:
    cases = [argument for argument in sys.argv[1:] if argument != "--whole"]
    if "--whole" in sys.argv:
        api.play_folded = lambda programs, calls, play: play(programs, calls)  # type: ignore[attr-defined]
    for case in cases or [*CASES, *ACCUMULATION]:
        setup = setup_of(case)
        print(case)
        parts(setup)
        clock = Clock()
        outcome = api.simulate_setup(setup)
        kernels = sum(int((rank.program.row_kind == Row.LAUNCH).sum()) for rank in outcome.ranks)
        assert outcome.time is not None and outcome.lanes is not None
        step_s = outcome.time.step_ns * 1e-9
        clock.past("all", f"{kernels:,} kernels in {outcome.cycle.steps} steps; step {step_s:.2f} s")
        if case in ACCUMULATION:
            continue
        trace = trace_bytes(outcome.memory, outcome.lanes, Rank(0, setup.cluster.gpus, "", 0))
        clock.past("trace", f"{len(trace) / 1e6:.1f} MB, of the worst rank")


if __name__ == "__main__":
    main()
