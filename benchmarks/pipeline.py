"""How long a large pipeline takes to play, kernel by kernel, with every stage's memory in the full allocator.

    PYTHONPATH=. python benchmarks/pipeline.py [SCHEDULE] [IMPLEMENTATION]

GPT-3 175B, 8 stages, 64 micro-batches, as many steps as a run plays at first (default: 1f1b, nanogpt), one rank per
stage without tensor parallelism. CPU seconds on one core, garbage collector off as in a run.
"""

from __future__ import annotations

import resource
import sys
import time

import numpy as np

from sim.api import cost_model, device_memory
from sim.engine.play import play
from sim.engine.steady import find_cycle
from sim.program.collector import without_collector
from sim.program.program import Row
from sim.runtime.extend import RECORDED_STEPS, cut, extend
from sim.runtime.lower import lower
from sim.runtime.record import record
from sim.scenario import load_text
from sim.timeline.lanes import make_lanes
from sim.timeline.metrics import bubble_fraction, step_time

SCENARIO = """
model: {{preset: gpt-3-175b, implementation: {implementation}, tied_embeddings: false, dropout: 0}}
cluster: {{gpu: a100-sxm-80gb, gpus_per_node: 8, usable_memory: 4 TiB}}
batch: {{micro_batch: 1, seq_len: 2048, accumulation: 64}}
precision: {{parameters: bf16, compute: bf16}}
parallel: {{pipeline: {{degree: 8, schedule: {schedule}}}}}
"""


USUAL_STEPS = 4
"""Until memory repeats itself, away from the limit."""


class Clock:
    """Prints the CPU time of each part."""

    def __init__(self) -> None:
        self.start = self.last = time.process_time()

    def past(self, part: str, amount: str = "") -> None:
        now = time.process_time()
        print(f"{part:12} {now - self.last:6.2f} s  {amount}")
        self.last = now


def main() -> None:
    schedule, implementation = (*sys.argv[1:3], *("1f1b", "nanogpt")[len(sys.argv) - 1 :])
    setup = load_text(SCENARIO.format(schedule=schedule, implementation=implementation), "benchmark").strategies[0]
    clock = Clock()
    with without_collector():
        recorded = [record(setup, RECORDED_STEPS, rank=rank) for rank in range(setup.stages)]
        clock.past("record", f"{RECORDED_STEPS} steps")
        steps = USUAL_STEPS
        programs = [extend(program, steps) for program in recorded]
        kernels = sum(int(np.sum(program.row_kind == Row.LAUNCH)) for program in programs)
        clock.past("extend", f"{steps} steps, {kernels:,} kernels")
        memories = [device_memory(setup, program) for program in programs]
        clock.past("allocator", f"{sum(memory.played for memory in memories):,} memory events")
        cycle = find_cycle(memories)
        steps = steps if cycle is None else cycle.steps
        programs = [cut(program, steps) for program in programs]
        clock.past("cycle", "none yet" if cycle is None else f"settled after {steps} steps")
        lowered = lower(programs, cost_model(setup), setup.mesh)
        clock.past("lower", f"{sum(len(rank.kind) for rank in lowered.world.ranks):,} rows of the world")
        played = play(lowered.world)
        clock.past("engine")
        ranks = list(zip(programs, lowered.entries))
        lanes = [make_lanes(program, lowered.world, played, entries, n) for n, (program, entries) in enumerate(ranks)]
        clock.past("lanes", "start and end of every kernel")
        step_s = max(step_time(rank).step_ns for rank in lanes) * 1e-9
        clock.past("metrics", f"step {step_s:.1f} s, bubble {bubble_fraction(lanes):.1%}")
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    print(f"{'all':12} {time.process_time() - clock.start:6.2f} s  {resident:.2f} GiB resident")


if __name__ == "__main__":
    main()
