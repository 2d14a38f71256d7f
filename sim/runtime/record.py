"""From a set-up to the programs of its (simulated) ranks."""

from __future__ import annotations

from sim.model.config import ChainConfig
from sim.program.collector import without_collector
from sim.program.program import Program
from sim.runtime.chain import record_chain
from sim.runtime.extend import RECORDED_STEPS
from sim.runtime.templates import ReplayMismatch
from sim.runtime.train import record_training
from sim.runtime.train_pipeline import record_pipeline
from sim.scenario.setup import Setup


def steps_to_record(setup: Setup) -> int:
    """So many that the last two are alike: DDP makes its buckets anew in the second."""
    return RECORDED_STEPS + (setup.ddp is not None)


def record(setup: Setup, steps: int = 2, fail_at: int | None = None, rank: int = 0) -> Program:
    """Everything that a rank issues in `steps` steps; `fail_at`: the allocation that is refused.

    `rank` counts the ranks of a pipeline, else it is 0.
    """
    with without_collector():
        if isinstance(setup.model, ChainConfig):
            return record_chain(setup, steps, fail_at, rank)
        try:
            return _record(setup, rank, steps, fail_at, stamps=True)
        except ReplayMismatch:  # layers were not as alike as they looked
            return _record(setup, rank, steps, fail_at, stamps=False)


def _record(setup: Setup, rank: int, steps: int, fail_at: int | None, stamps: bool) -> Program:
    if setup.pipeline is not None:
        return record_pipeline(setup, rank, steps, fail_at, stamps, folds=stamps)
    return record_training(setup, steps, fail_at, stamps, folds=stamps)
