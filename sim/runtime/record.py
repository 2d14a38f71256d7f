"""From a set-up to the program of its (simulated) rank."""

from __future__ import annotations

from sim.model.config import ChainConfig
from sim.program.collector import without_collector
from sim.program.program import Program
from sim.runtime.chain import record_chain
from sim.runtime.replay import ReplayMismatch
from sim.runtime.train import record_training
from sim.scenario.setup import Setup


def record(setup: Setup, steps: int = 2, fail_at: int | None = None) -> Program:
    """Everything that rank 0 issues in `steps` steps; `fail_at`: the allocation that is refused."""
    with without_collector():
        if isinstance(setup.model, ChainConfig):
            return record_chain(setup, steps, fail_at)
        try:
            return record_training(setup, steps, fail_at)
        except ReplayMismatch:  # layers were not as alike as they looked
            return record_training(setup, steps, fail_at, stamps=False)
