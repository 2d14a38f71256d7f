"""The work of a scenario: its strategies' programs are recorded, and every distinct kernel becomes a case.

Shapes of the scenario are looked up exactly afterwards, so they come first, those that take most of a step before others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from calibration.measure import attention, gemm
from calibration.measure.case import SCENARIO, Case
from calibration.measure.families import recipes
from calibration.measure.recipes import WIDTH
from sim.api import cost_model, load
from sim.model.config import ModelConfig
from sim.program.kernels import Attention, Collective, Fixed, Gemm, Kernel, Memory
from sim.program.program import PHASE_SHIFT, Phase, Program, Row
from sim.runtime.record import record, steps_to_record
from sim.scenario.setup import Setup

FORWARD_PHASES = (Phase.FORWARD, Phase.RECOMPUTE, Phase.LOSS)
WIDE_ROWS = ("cross_entropy",)
"""Families whose rows are as wide as the vocabulary."""


@dataclass(slots=True)
class ScenarioWork:
    """Cases, the most expensive first; names of kernels that no script runs, with how often a step launches them."""

    cases: list[Case] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    collectives: list[Collective] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Launched:
    """A kernel of a program: how often, how much time it is thought to take in all, and whether on the way forward."""

    kernel: Kernel
    count: int
    estimate_ns: float
    forward: bool


def work_of(path: Path, overrides: Sequence[str] = (), dtype: str | None = None) -> ScenarioWork:
    """The work of all strategies of a scenario file. `dtype`: in place of the dtype of compute. Raises ScenarioError."""
    return work_of_setups(load(path, overrides).strategies, dtype)


def work_of_setups(setups: Sequence[Setup], dtype: str | None = None) -> ScenarioWork:
    found = ScenarioWork()
    by_key: dict[str, tuple[float, Case]] = {}
    collectives: dict[Collective, None] = {}
    for setup in setups:
        if not isinstance(setup.model, ModelConfig):
            continue
        for rank in range(setup.stages):
            program = record(setup, steps_to_record(setup), rank=rank)
            collectives.update(dict.fromkeys(replace(c, group="") for c in program.collectives))
            for launched, case in _cases(setup, program, dtype):
                if case is None:
                    found.left_out[launched.kernel.name] += launched.count
                    continue
                known, _ = by_key.get(case.key, (0.0, case))
                by_key[case.key] = (known + launched.estimate_ns, case)
    found.cases = [case for _, case in sorted(by_key.values(), key=lambda entry: -entry[0])]
    found.collectives = list(collectives)
    return found


def _cases(setup: Setup, program: Program, dtype: str | None) -> Iterator[tuple[Launched, Case | None]]:
    launched = list(launches(setup, program))
    rows = {entry.kernel.work.m for entry in launched if entry.forward and isinstance(entry.kernel.work, Gemm)}
    assert isinstance(setup.model, ModelConfig)
    precision = setup.precision
    compute = dtype or (precision.compute if precision.compute in gemm.CUDA_POINTS else "bf16")
    for entry in launched:
        kernel, work = entry.kernel, entry.kernel.work
        case: Case | None = None
        if isinstance(work, Gemm):
            layout = "forward" if entry.forward else "wgrad" if work.k in rows and work.m not in rows else "dgrad"
            if kernel.name in gemm.NAMES and not work.accumulate:
                case = gemm.case(work, layout, kernel.name, SCENARIO)
        elif isinstance(work, Attention):
            if work.generation in attention.GENERATIONS and not work.past:
                case = attention.case(work, kernel.name, SCENARIO)
        elif isinstance(work, Memory) and kernel.name in (known := recipes()):
            family, recipe = known[kernel.name]
            width = setup.model.vocab if work.family in WIDE_ROWS else setup.model.hidden or WIDTH
            case = recipe.case(work.bytes, compute, width, family, SCENARIO, work.family)
        elif isinstance(work, Fixed):
            continue
        yield entry, case


def launches(setup: Setup, program: Program) -> Iterator[Launched]:
    """Every kernel of the program's table, with its launches."""
    rows = program.row_kind == Row.LAUNCH
    counts = np.bincount(program.row_argument[rows], minlength=len(program.kernels))
    phases = program.row_where[rows] >> PHASE_SHIFT
    forward = set(program.row_argument[rows][np.isin(phases, FORWARD_PHASES)].tolist())
    prices = cost_model(replace(setup, profile=None))
    for number, (kernel, count) in enumerate(zip(program.kernels, counts.tolist())):
        if count:
            yield Launched(kernel, count, count * prices.kernel_ns(kernel), number in forward)
