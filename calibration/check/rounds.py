"""Rounds of measurement: in each every strategy steps once and every operator runs a few times, so that whatever else the
machine does falls on predictions and on what they are compared with alike."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch

from calibration.check.clock import last_cache_bytes, times_ns, typical
from calibration.check.kept import Kept, Samples
from calibration.check.operators import operands, recipe_of
from calibration.check.plan import PLAIN
from calibration.check.pool import Pool
from calibration.check.predict import program_of
from calibration.check.step import TrainingStep
from sim.program.kernels import Operator
from sim.program.program import Program
from sim.scenario.setup import Setup

AGAIN = "plain again"
"""The control: what two measurements of the same thing differ by."""
SAMPLES_A_ROUND = 3
CACHES = 2
"""The pool of operands is so many times the last cache."""
WARM_UP_STEPS = 2
LOOP_PARAMETERS, LOOP_KEY = 64, "optimizer loop"


@dataclass(slots=True)
class Group:
    """Strategies of one network at one batch size, which run against each other."""

    name: str
    setups: Sequence[Setup]
    kept: Kept
    programs: dict[str, Program] = field(init=False)
    operators: list[Operator] = field(init=False)
    steps: dict[str, TrainingStep] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.programs = {setup.name: program_of(setup) for setup in self.setups}
        works = (kernel.work for program in self.programs.values() for kernel in program.kernels)
        self.operators = list(dict.fromkeys(work for work in works if isinstance(work, Operator)))

    @property
    def rounds(self) -> int:
        """So many have been kept."""
        return len(self.kept.samples[self.key(self.setups[0].name)])

    def key(self, strategy: str) -> str:
        return f"{self.name}: {strategy}"

    def start(self) -> None:
        """Build the real networks, and let them step until nothing is new."""
        self.steps = {setup.name: TrainingStep(setup) for setup in self.setups}
        if PLAIN in self.steps:
            self.steps[AGAIN] = TrainingStep(self.setups[0])
        for step in self.steps.values():
            for _ in range(WARM_UP_STEPS):
                step()

    def round(self, pool: Pool) -> None:
        found: Samples = {self.key(name): times_ns([step]) for name, step in self.steps.items()}
        for work in self.operators:
            found[operator_key(work)] = time_operator(work, pool)
        self.kept.add(found)

    def end(self) -> None:
        self.steps = {}

    def step_ns(self, strategy: str) -> list[float]:
        return self.kept.samples[self.key(strategy)]

    def operator_ns(self) -> dict[Operator, float]:
        return {work: typical(self.kept.samples[operator_key(work)]) for work in self.operators}


def operator_key(work: Operator) -> str:
    return json.dumps(asdict(work))


def time_operator(work: Operator, pool: Pool) -> list[float]:
    """ns per launch, of a few runs on operands that no cache holds. Raises KeyError for an operator without a recipe."""
    recipe = recipe_of(work)
    with torch.no_grad():
        run, calls = recipe.run(work), recipe.calls(work)
        sets = [operands(work, pool) for _ in range(SAMPLES_A_ROUND + 1)]
        run(sets.pop())
        return [took / calls for took in times_ns([partial(run, given) for given in sets])]


def make_pool() -> Pool:
    return Pool(CACHES * last_cache_bytes())


def time_loop() -> list[float]:
    """ns per parameter of a fused step over parameters that are nearly nothing."""
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(LOOP_PARAMETERS)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    optimizer.step()
    return [took / LOOP_PARAMETERS for took in times_ns([optimizer.step] * SAMPLES_A_ROUND)]
