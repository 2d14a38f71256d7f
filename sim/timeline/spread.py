"""How far may a step time be off? From the uncertainties of the kernels that fill the step.

The sigma of a figure is shared by all kernels that it prices, so within a family errors add up; families are taken as
unrelated; copies count where nothing computes beside them. What else no kernel fills (exposed communication, host) has
no sigma of its own here.
"""

from __future__ import annotations

from collections import defaultdict
from math import hypot

import numpy as np

from sim.cost.model import CostModel
from sim.program.kernels import Attention, Gemm, Memory, Work
from sim.timeline.lanes import Lanes
from sim.timeline.memory import step_ranges


def step_sigma(lanes: Lanes, cost: CostModel, step_ns: float) -> float:
    """Relative sigma of the steady step's time: 0.06 means a range of about 6 % each way."""
    program = lanes.program
    first, last = step_ranges([(m.name, m.rows) for m in program.marks], len(lanes.start_ns))[-1]
    rows = lanes.in_step(first, last) & lanes.computes
    busy_ns = np.bincount(
        program.row_argument[rows], lanes.end_ns[rows] - lanes.start_ns[rows], minlength=len(program.kernels)
    )
    by_family: dict[str, float] = defaultdict(float)
    for kernel, ns in zip(program.kernels, busy_ns.tolist()):
        if ns:
            by_family[_family(kernel.work)] += ns * cost.uncertainty(kernel.work, kernel.name)
    step = lanes.in_step(first, last)
    exposed_ns = lanes.exposed_ns(step & (lanes.is_copy | lanes.computes)) if (step & lanes.is_copy).any() else 0.0
    by_family["copy"] = exposed_ns * cost.copy_uncertainty("device_to_host")
    return hypot(*by_family.values()) / step_ns if step_ns else 0.0


def _family(work: Work) -> str:
    if isinstance(work, Gemm):
        return f"gemm {work.dtype}"
    if isinstance(work, Attention):
        return f"attention {work.generation}"
    return work.family if isinstance(work, Memory) else "given"
