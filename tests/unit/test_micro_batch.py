"""The largest micro-batch of a pipeline is that which its fullest rank allows, and that rank alone says what is too much."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim import api
from sim.plan.micro_batch import largest_micro_batch
from sim.scenario import load_text
from sim.scenario.setup import Setup

TEXT = """
model: {preset: gpt-tiny, implementation: nanogpt, layers: 8}
cluster: {gpu: a100, gpus_per_node: 4, usable_memory: 3 GiB}
batch: {micro_batch: 1, seq_len: 512, accumulation: 8}
precision: {parameters: bf16, compute: bf16}
parallel: {pipeline: {degree: 4}}
"""


def fits(setup: Setup, micro_batch: int) -> bool:
    _, memories, _ = api.settle(replace(setup, batch=replace(setup.batch, micro_batch=micro_batch)))
    return all(memory.out_of_memory is None for memory in memories)


def test_a_rank_that_does_not_fit_speaks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = load_text(TEXT, "test").strategies[0]
    outcome = api.simulate_setup(setup)
    recorded: list[tuple[int, int]] = []

    def record(setup: Setup, steps: int, rank: int) -> object:
        recorded.append((setup.batch.micro_batch, rank))
        return whole(setup, steps, rank=rank)

    whole = api.record
    monkeypatch.setattr(api, "record", record)
    found = largest_micro_batch(outcome)
    assert found is not None and found.size > 1
    assert {size for size, _ in recorded} == {size for size in found.simulated if size <= found.size}
    assert fits(setup, found.size) and not fits(setup, found.size + 1)
