"""A pipeline rank whose steady state was recorded in part issues what it issues when all of it is recorded."""

from __future__ import annotations

import pytest

from sim.runtime.pipeline import EARLY
from sim.runtime.recorder import Recorder
from sim.runtime.schedules import Step, orders, parts_of, with_transfers
from sim.runtime.schedules.folding import fold
from sim.runtime.train_pipeline import PipelineTraining, record_pipeline
from sim.scenario import load_text
from sim.scenario.setup import Setup
from tests.exact.test_stamps import assert_equal

PIPELINE = """
model: {preset: gpt-tiny, implementation: IMPLEMENTATION, layers: LAYERS, dropout: 0.1}
cluster: {gpu: a100, gpus_per_node: 4, nodes: NODES}
batch: {micro_batch: 2, seq_len: 256, accumulation: 32}
precision: {parameters: bf16, compute: bf16}
parallel: {PARALLEL, pipeline: {degree: 4, schedule: SCHEDULE}}
checkpoint: CHECKPOINT
"""
TENSOR = "tensor: {degree: 2, sequence_parallel: true}"
OVERLAPPED = f"{TENSOR}, data: {{degree: 2, overlap: true, distributed_optimizer: true}}"
KEPT = f"{TENSOR}, data: {{degree: 2, distributed_optimizer: true, keep_gradients: true}}"
FOLDED = [
    ("nanogpt", "1f1b", "fsdp: null", 1),
    ("nanogpt", "1f1b", "fsdp: {degree: 2}", 2),
    ("nanogpt", "dualpipe-v", "fsdp: null", 1),
    ("nanogpt", "zb-v", "fsdp: null", 1),  # holds on to gradients of inputs, so that some ranks do not fold
    *(("megatron", schedule, TENSOR, 2) for schedule in ("1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")),
    *(("megatron", schedule, OVERLAPPED, 4) for schedule in ("1f1b", "zb-h1")),
    ("megatron", "1f1b", KEPT, 4),
    ("megatron", "1f1b, scatter_gather: true", "tensor: {degree: 2}", 2),
    ("megatron", "interleaved, virtual: 1, overlap_p2p: false, scatter_gather: true", "tensor: {degree: 2}", 2),
]


def setup_of(implementation: str, schedule: str, parallel: str, nodes: int, checkpoint: str = "null") -> Setup:
    text = PIPELINE.replace("IMPLEMENTATION", implementation).replace("SCHEDULE", schedule).replace("NODES", str(nodes))
    text = text.replace("PARALLEL", parallel).replace("CHECKPOINT", checkpoint)
    return load_text(text.replace("LAYERS", "8" if schedule.endswith("v") else "4"), "folds").strategies[0]


@pytest.mark.parametrize(("implementation", "schedule", "parallel", "nodes"), FOLDED)
def test_folded_equals_whole(implementation: str, schedule: str, parallel: str, nodes: int) -> None:
    setup = setup_of(implementation, schedule, parallel, nodes)
    for rank in range(4):
        folded = record_pipeline(setup, rank, 3)
        assert_equal(folded, record_pipeline(setup, rank, 3, stamps=False, folds=False))


RECOMPUTED = [
    *(
        ("megatron", TENSOR, 2, part)
        for part in ("{every: 1}", "{every: 1, reentrant: true}", "{inside: core_attention}")
    ),
    *(("nanogpt", "fsdp: null", 1, part) for part in ("{every: 1}", "{every: 1, reentrant: true}")),
]


@pytest.mark.parametrize(("implementation", "parallel", "nodes", "checkpoint"), RECOMPUTED)
def test_folded_equals_whole_with_recomputation(
    implementation: str, parallel: str, nodes: int, checkpoint: str
) -> None:
    """Buffers that PipelineStage makes at once become checkpoints, also those of micro-batches left out."""
    setup = setup_of(implementation, "1f1b", parallel, nodes, checkpoint)
    for rank in range(4):
        assert_equal(record_pipeline(setup, rank, 3), record_pipeline(setup, rank, 3, stamps=False, folds=False))


def test_micro_batches_that_are_kept_are_not_folded() -> None:
    setup = setup_of("megatron", "1f1b", TENSOR, 2, "{keep_micro_batches: 1}")
    assert_equal(record_pipeline(setup, 0, 3), record_pipeline(setup, 0, 3, stamps=False, folds=False))


def test_folding_happens() -> None:
    """Otherwise the comparisons above compare a thing with itself."""
    run = PipelineTraining(setup_of("megatron", "1f1b", TENSOR, 2), Recorder(), 1, folds=True)
    assert len(run.pipeline.steps) < 0.5 * 32 * 6


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"]
)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 4), (2, 4), (4, 16), (4, 64), (8, 32)])
def test_a_fold_leaves_out_whole_periods(schedule: str, ranks: int, micro_batches: int) -> None:
    chunks = 1 if schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2") else 2
    made = orders(schedule, ranks, micro_batches, chunks)
    folds = schedule in ("zb-v", "dualpipe-v")
    for steps in with_transfers(made, parts_of(ranks, chunks, folds), early=schedule in EARLY):
        found = fold(steps)
        if found is None:
            continue
        period = found.steps[found.begin : found.end]
        whole = [*found.steps[: found.end]]
        for n in range(1, found.times + 1):
            whole += [later(step, n * found.shift) for step in period]
        whole += [later(step, found.times * found.shift) for step in found.steps[found.end :]]
        assert whole == steps
        assert [later(step, found.shift) for step in found.steps[found.before : found.begin]] == list(period)


def later(step: Step, micro_batches: int) -> Step:
    action = step.action._replace(micro_batch=step.action.micro_batch + micro_batches)
    return Step(action, step.receives, step.sends)
