"""Times of a run of which most equal micro-batches were not played are those of the whole run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim import api
from sim.engine import folded
from sim.runtime.driver_calls import host_calls
from sim.scenario import load_text
from sim.scenario.setup import Setup
from tests.exact.test_folded_accumulation import setup_of

PIPELINE = """
model: {preset: gpt-tiny, implementation: megatron, layers: 8, hidden: 1024, heads: 8, dropout: 0.1}
cluster: {gpu: a100, gpus_per_node: 4, nodes: NODES, usable_memory: 80 GiB}
batch: {micro_batch: 2, seq_len: 512, accumulation: 96}
precision: {parameters: bf16, compute: bf16}
parallel: {tensor: {degree: 2, sequence_parallel: true}, DATA pipeline: {degree: 4, schedule: SCHEDULE}}
host: {sync: [loss]}
allocator: ALLOCATOR
"""
PIPELINES = [
    ("1f1b", "off", ""),
    ("1f1b", '""', ""),
    ("1f1b", "off", "data: {degree: 2, overlap: true, distributed_optimizer: true}, "),
    ("interleaved, virtual: 2", "off", ""),
    ("zb-h1", "off", ""),
    ("dualpipe-v", "off", ""),
]


def rows_played(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Rows in the last play, and of the whole programs; the times are compared."""
    programs, memories, _ = api.settle(setup)
    played: list[int] = []

    def count(*given: object, whole: object = api.play_whole) -> object:
        played.append(sum(len(program.row_kind) for program in given[1]))
        return whole(*given)

    monkeypatch.setattr(api, "play_whole", count)
    calls = [host_calls(memory.program, memory.driver_calls, api.cost_model(setup)) for memory in memories]
    ours = api.play_time(setup, programs, memories)
    theirs = api.play_whole(setup, programs, calls)
    for own, their in zip(ours, theirs):
        for name in ("issue_ns", "start_ns", "end_ns", "host_end_ns", "device_end_ns"):
            np.testing.assert_allclose(getattr(own, name), getattr(their, name), rtol=1e-12, atol=0.01, err_msg=name)
    return played[-2], played[-1]


@pytest.mark.parametrize(("schedule", "allocator", "data"), PIPELINES)
def test_pipelines(schedule: str, allocator: str, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PIPELINE.replace("SCHEDULE", schedule).replace("ALLOCATOR", allocator).replace("DATA ", data)
    setup = load_text(text.replace("NODES", "4" if data else "2"), "folds").strategies[0]
    monkeypatch.setattr(folded, "LAUNCH_QUEUE_ROWS", 256)  # look soon; a world that goes on otherwise is found out
    played, rows = rows_played(setup, monkeypatch)
    assert played < 0.5 * rows or schedule != "1f1b"


@pytest.mark.parametrize("case", ["fsdp", "fsdp on the host", "streamed to the host", "ddp", "zero 3", "experts"])
def test_accumulation(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_of(case)
    played, rows = rows_played(replace(setup, batch=replace(setup.batch, accumulation=48)), monkeypatch)
    assert played < 0.7 * rows
