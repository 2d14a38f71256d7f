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
MEGATRON = """
model: {preset: gpt-tiny, implementation: megatron, layers: 9}
cluster: {gpu: a100, gpus_per_node: 8}
batch: {micro_batch: 2, seq_len: 128, accumulation: 3}
precision: {parameters: bf16, compute: bf16}
"""
PARALLEL = {
    "tp": "{tensor: {degree: 8}}",
    "tp and sp": "{tensor: {degree: 8, sequence_parallel: true}}",
    "tp and dp": "{tensor: {degree: 2, sequence_parallel: true}, data: {degree: 4, distributed_optimizer: true}}",
    "overlapped dp": "{tensor: {degree: 2}, data: {degree: 4, overlap: true, gradient_accumulation_fusion: false}}",
    "kept gradients": "{tensor: {degree: 2}, data: {degree: 4, keep_gradients: true}}",
    "tp and fsdp": "{tensor: {degree: 2}, fsdp: {degree: 4}}",
}
CONTEXT = {
    "ring": "{context: {degree: 4}, tensor: {degree: 2, sequence_parallel: true}}",
    "all-gather": "{context: {degree: 4, kind: all-gather}, fsdp: {degree: 2}}",
}
MEGATRON_FORMS = {
    "none": "null",
    "full": "{reentrant: true}",
    "segments of 2": "{segment: 2}",
    "core attention": "{inside: core_attention, reentrant: true}",
    "every second mlp": "{inside: mlp, every: 2}",
}
CHECKPOINTS = {
    "none": "null",
    "full": "{every: 1}",
    "no early stop": "{every: 1, reentrant: true}",
    "every 2": "{every: 2}",
    "segments of 2": "{segment: 2}",
    "first 5": "{first: 5}",
    "selective": "{save: [attention, every_second_matmul]}",
    "mm only": "{save: [aten.mm]}",
    "reentrant": "{reentrant: true}",
    "sequential": "{sequential: 4}",
    "nested": "{nested: [3, 3]}",
    "nested reentrant": "{nested: [4, 2], reentrant: true}",
    "boundaries": "{boundaries: [2, 4, 6]}",
    "per layer": "{layers: [full, none, {reentrant: true}]}",
}
PARTS = {
    "attention": "{inside: attention}",
    "mlp reentrant": "{inside: mlp, reentrant: true}",
    "norm discarded": "{discard: norm}",
    "both": "{inside: attention, discard: norm}",
    "per layer": "{layers: [full, {inside: attention}, {discard: norm}]}",
}
MEGATRON_PARTS = {
    "core attention": "{inside: core_attention, reentrant: true}",
    "norm and activation": "{discard: [norm, activation]}",
    "core attention and norm": "{inside: core_attention, discard: norm, reentrant: true}",
    "full": "{reentrant: true}",
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


@pytest.mark.parametrize("checkpoint", [*CHECKPOINTS.values(), *PARTS.values()], ids=[*CHECKPOINTS, *PARTS])
@pytest.mark.parametrize("sync", ["every", "last"])
@pytest.mark.parametrize("implementation", ["torchtitan", "transformers"])
def test_llama_under_fsdp(implementation: str, sync: str, checkpoint: str) -> None:
    text = LLAMA.replace("IMPLEMENTATION", implementation).replace("degree: 8", f"degree: 8, gradient_sync: {sync}")
    setup = setup_of(text + f"checkpoint: {checkpoint}\n")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


@pytest.mark.parametrize(
    "checkpoint", ["null", "{every: 1}", "{save: [attention, every_second_matmul]}", "{segment: 2}"]
)
@pytest.mark.parametrize("kind", ["ring", "all-gather"])
def test_llama_over_shared_sequences(kind: str, checkpoint: str) -> None:
    parallel = f"{{context: {{degree: 4, kind: {kind}}}, fsdp: {{degree: 2}}}}"
    text = LLAMA.replace("IMPLEMENTATION", "torchtitan").replace("{fsdp: {degree: 8}}", parallel)
    setup = setup_of(text + f"checkpoint: {checkpoint}\n")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


@pytest.mark.parametrize("checkpoint", ["none", "full", "every 2", "selective", "first 5"])
@pytest.mark.parametrize("implementation", ["torchtitan", "transformers"])
def test_compiled_llama_under_fsdp(implementation: str, checkpoint: str) -> None:
    text = LLAMA.replace("IMPLEMENTATION", implementation) + f"compile: {{}}\ncheckpoint: {CHECKPOINTS[checkpoint]}\n"
    setup = setup_of(text)
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


@pytest.mark.parametrize("gather", [False, True])
def test_float8_llama_under_fsdp(gather: bool) -> None:
    text = LLAMA.replace("IMPLEMENTATION", "torchtitan").replace("reduce: fp32", "reduce: fp32, float8: tensorwise")
    text = text.replace("fsdp: {degree: 8}", f"fsdp: {{degree: 8, float8_all_gather: {str(gather).lower()}}}")
    setup = setup_of(text + "compile: {}\n")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("dropout", ["0.0", "0.1"])
def test_gpt_on_one_gpu(dropout: str, checkpoint: str) -> None:
    setup = setup_of(GPT.replace("DROPOUT", dropout) + f"checkpoint: {CHECKPOINTS[checkpoint]}\n")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


@pytest.mark.parametrize("checkpoint", MEGATRON_FORMS)
@pytest.mark.parametrize("parallel", PARALLEL)
def test_megatron_over_several_ranks(parallel: str, checkpoint: str) -> None:
    setup = setup_of(f"{MEGATRON}parallel: {PARALLEL[parallel]}\ncheckpoint: {MEGATRON_FORMS[checkpoint]}\n")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


@pytest.mark.parametrize("checkpoint", MEGATRON_PARTS)
@pytest.mark.parametrize("parallel", ["tp and dp", "tp and fsdp", "ring", "all-gather"])
def test_megatrons_llama(parallel: str, checkpoint: str) -> None:
    text = MEGATRON.replace("gpt-tiny", "llama-tiny, kv_heads: 2").replace("seq_len: 128", "seq_len: 256")
    setup = setup_of(f"{text}parallel: {(PARALLEL | CONTEXT)[parallel]}\ncheckpoint: {MEGATRON_PARTS[checkpoint]}\n")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


@pytest.mark.parametrize("schedule", ["{degree: 2}", "{degree: 2, schedule: interleaved, virtual: 2}"])
@pytest.mark.parametrize("overlap", ["false", "true"])
def test_megatron_over_three_dimensions(overlap: str, schedule: str) -> None:
    data = f"{{degree: 2, overlap: {overlap}, distributed_optimizer: true}}"
    text = MEGATRON.replace("layers: 9", "layers: 16").replace("accumulation: 3", "accumulation: 8")
    text += f"parallel: {{tensor: {{degree: 2, sequence_parallel: true}}, data: {data}, pipeline: {schedule}}}\n"
    setup = setup_of(f"{text}checkpoint: {MEGATRON_FORMS['core attention']}\n")
    for rank in range(2):
        assert_equal(record_pipeline(setup, rank, 3, stamps=True), record_pipeline(setup, rank, 3, stamps=False))


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


@pytest.mark.parametrize("checkpoint", MEGATRON_PARTS)
@pytest.mark.parametrize("dropout", ["0.0", "0.1"])
def test_megatron_on_one_gpu(dropout: str, checkpoint: str) -> None:
    text = GPT.replace("nanogpt", "megatron, bias_gelu_fusion: false").replace("DROPOUT", dropout)
    setup = setup_of(text + f"checkpoint: {MEGATRON_PARTS[checkpoint]}\n")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
@pytest.mark.parametrize("checkpoint", ["null", "{every: 1}"])
def test_evaluation(checkpoint: str, mode: str) -> None:
    setup = setup_of(GPT.replace("DROPOUT", "0.1") + f"checkpoint: {checkpoint}\nmode: {mode}\n")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


@pytest.mark.parametrize(
    "optimizer", ["{name: sgd, momentum: 0.9}", "{name: adamw-8bit}", "{in_backward: true, clip_norm: null}"]
)
@pytest.mark.parametrize("chunking", ["backward", "projection"])
def test_chunked_losses_and_other_optimizers(chunking: str, optimizer: str) -> None:
    text = GPT.replace("DROPOUT", f"0.1, loss_chunks: 4, loss_chunking: {chunking}").replace(", accumulation: 2", "")
    setup = setup_of(f"{text}checkpoint: {{every: 1}}\noptimizer: {optimizer}\n")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


@pytest.mark.parametrize("chunking", ["logits", "projection"])
def test_chunked_losses_under_fsdp(chunking: str) -> None:
    text = LLAMA.replace("IMPLEMENTATION", f"torchtitan, loss_chunks: 4, loss_chunking: {chunking}")
    setup = setup_of(f"{text}checkpoint: {{every: 1}}\n")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


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


@pytest.mark.parametrize(
    "text", [LLAMA.replace("IMPLEMENTATION", "torchtitan"), f"{MEGATRON}parallel: {PARALLEL['tp and sp']}\n"]
)
def test_stamping_happens(text: str) -> None:
    """Otherwise the comparisons above compare a thing with itself."""
    run = TrainingRun(setup_of(text), Recorder())
    run.tape.stamps = True
    with interpret(run.tape):
        run.initialize()
        run.step(0)
    assert any(t.forward is not None and t.backwards for t in run.tape.templates.values())
    run.finish()
