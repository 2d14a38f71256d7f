"""Stamped layers give the program that recording every layer gives: event by event, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.model.calls import interpret
from sim.program.program import Program
from sim.runtime.recorder import Recorder
from sim.runtime.replay import LayerNode
from sim.runtime.train import TrainingRun, record_training
from sim.runtime.train_pipeline import PipelineTraining, record_pipeline
from sim.scenario import load_text
from sim.scenario.setup import Setup

LLAMA = """
model: {preset: llama-tiny, implementation: IMPLEMENTATION, layers: 9}
cluster: {gpu: h100, gpus_per_node: 8}
batch: {micro_batch: 1, seq_len: 256, accumulation: 2}
precision: {parameters: fp32, compute: bf16, reduce: fp32, autocast: false}
parallel: {fsdp: {degree: 8}}
"""
GPT = """
model: {preset: gpt-tiny, implementation: nanogpt, layers: 9, dropout: DROPOUT}
cluster: {gpu: a100, gpus_per_node: 1}
batch: {micro_batch: 2, seq_len: 256, accumulation: 2}
precision: {parameters: bf16, compute: bf16}
"""
CHECKPOINTS = {
    "none": "null",
    "full": "{every: 1}",
    "no early stop": "{every: 1, early_stop: false}",
    "every 2": "{every: 2}",
    "segments of 2": "{segment: 2}",
    "first 5": "{first: 5}",
    "selective": "{save: [attention, every_second_matmul]}",
    "mm only": "{save: [aten.mm]}",
}
COLUMNS = (
    "row_kind", "row_stream", "row_argument", "mem_kind", "mem_handle", "mem_bytes", "mem_stream", "mem_row", "owners",
)  # fmt: skip


def setup_of(text: str) -> Setup:
    return load_text(text, "stamps").strategies[0]


def assert_equal(a: Program, b: Program) -> None:
    for column in COLUMNS:
        assert np.array_equal(getattr(a, column), getattr(b, column)), column
    for column in ("row_where", "mem_where"):
        assert [a.where(w) for w in getattr(a, column).tolist()] == [b.where(w) for w in getattr(b, column).tolist()]
    assert (a.kernels, a.collectives, a.host_works, a.marks) == (b.kernels, b.collectives, b.host_works, b.marks)
    assert a.transfers == b.transfers
    assert a.copies == b.copies
    assert np.array_equal(a.host_row, b.host_row) and np.array_equal(a.host_used, b.host_used)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("sync", ["every", "last"])
@pytest.mark.parametrize("implementation", ["torchtitan", "transformers"])
def test_llama_under_fsdp(implementation: str, sync: str, checkpoint: str) -> None:
    text = LLAMA.replace("IMPLEMENTATION", implementation).replace("degree: 8", f"degree: 8, gradient_sync: {sync}")
    setup = setup_of(text + f"checkpoint: {CHECKPOINTS[checkpoint]}\n")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("dropout", ["0.0", "0.1"])
def test_gpt_on_one_gpu(dropout: str, checkpoint: str) -> None:
    setup = setup_of(GPT.replace("DROPOUT", dropout) + f"checkpoint: {CHECKPOINTS[checkpoint]}\n")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


PIPELINE = """
model: {preset: gpt-tiny, implementation: IMPLEMENTATION, layers: 12, dropout: 0.1, tied_embeddings: true}
cluster: {gpu: a100, gpus_per_node: 4}
batch: {micro_batch: 2, seq_len: 256, accumulation: 4}
precision: {parameters: bf16, compute: bf16}
parallel: {pipeline: {degree: 2, schedule: SCHEDULE}, fsdp: {degree: 2}}
"""


@pytest.mark.parametrize("checkpoint", ["null", "{every: 1}", "{save: [attention]}", "{keep_micro_batches: 1}"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "breadth-first"])
@pytest.mark.parametrize("implementation", ["nanogpt", "megatron"])
def test_pipeline_stages(implementation: str, schedule: str, checkpoint: str) -> None:
    text = PIPELINE.replace("IMPLEMENTATION", implementation).replace("SCHEDULE", schedule)
    setup = setup_of(text + f"checkpoint: {checkpoint}\n")
    for rank in range(2):
        stamped = record_pipeline(setup, rank, 3, stamps=True)
        assert_equal(stamped, record_pipeline(setup, rank, 3, stamps=False))
        assert stamped.transfers


def test_llama_stages() -> None:
    text = LLAMA.replace("IMPLEMENTATION", "torchtitan").replace("degree: 8", "degree: 4")
    setup = setup_of(text.replace("{fsdp", "{pipeline: {degree: 2, placement: [4, 5]}, fsdp"))
    for rank in range(2):
        assert_equal(record_pipeline(setup, rank, 3, stamps=True), record_pipeline(setup, rank, 3, stamps=False))


def test_a_pipeline_stage_runs_few_layers_live() -> None:
    """Of 6 layers, 4 micro-batches and 3 steps: only until forward and both backwards have been seen."""
    setup = setup_of(PIPELINE.replace("IMPLEMENTATION", "nanogpt").replace("SCHEDULE", "1f1b"))
    run = PipelineTraining(setup, Recorder(), 0)
    run.tape.stamps = True
    live = []
    original = LayerNode.live_forward

    def counted(node: LayerNode, *arguments: Any, **named: Any) -> Any:
        live.append(node.path)
        return original(node, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch, interpret(run.tape):
        patch.setattr(LayerNode, "live_forward", counted)
        run.initialize()
        for number in range(3):
            run.step(number)
            if number == 0:
                first_step = len(live)
    assert first_step <= 2 * 6
    assert len(live) == first_step


@pytest.mark.parametrize(
    "offload",
    [
        "offload: {what: activations}\ncheckpoint: {first: 3}",
        "offload: {what: checkpoint_inputs, streams: side}\ncheckpoint: {}",
        "offload: {what: saved_tensors, layers: ratio 0.5}",
        "offload: {what: saved_tensors}",
        "checkpoint: {every: 2}",
    ],
)
@pytest.mark.parametrize("states", ["false", "true"])
def test_offload_under_fsdp(states: str, offload: str) -> None:
    text = LLAMA.replace("IMPLEMENTATION", "torchtitan").replace("degree: 8", f"degree: 8, cpu_offload: {states}")
    setup = setup_of(f"{text}{offload}\n")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


def test_stamping_happens() -> None:
    """Otherwise the comparisons above compare a thing with itself."""
    run = TrainingRun(setup_of(LLAMA.replace("IMPLEMENTATION", "torchtitan")), Recorder())
    run.tape.stamps = True
    with interpret(run.tape):
        run.initialize()
        run.step(0)
    assert any(t.forward is not None and t.backwards for t in run.tape.templates.values())
    run.finish()
