"""From a set-up to the program of its (simulated) rank."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from sim.model.config import ChainConfig
from sim.program.program import Program
from sim.runtime.chain import record_chain
from sim.runtime.replay import ReplayMismatch
from sim.runtime.train import record_training
from sim.scenario.setup import Setup


def record(setup: Setup, steps: int = 2, fail_at: int | None = None) -> Program:
    """Everything that rank 0 issues in `steps` steps; `fail_at`: the allocation that is refused."""
    with _no_garbage_collection():
        if isinstance(setup.model, ChainConfig):
            return record_chain(setup, steps, fail_at)
        try:
            return record_training(setup, steps, fail_at)
        except ReplayMismatch:  # layers were not as alike as they looked
            return record_training(setup, steps, fail_at, stamps=False)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Reference counting decides when a tensor dies, as in PyTorch; a run makes no cycles worth looking for."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
