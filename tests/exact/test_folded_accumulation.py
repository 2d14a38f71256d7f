"""Micro-batches that are left out while recording, and put in afterwards, issue what they issue when recorded."""

from __future__ import annotations

import pytest

from sim.runtime.record import steps_to_record
from sim.runtime.train import record_training
from sim.scenario import load_text
from sim.scenario.setup import Setup
from tests.exact.test_stamps import assert_equal

TEXT = """
model: {preset: PRESET, layers: 3, IMPLEMENTATION}
cluster: {gpu: h100, gpus_per_node: GPUS}
batch: {micro_batch: 1, seq_len: 128, accumulation: 10}
"""
TITAN, TRANSFORMERS = ("llama-tiny", "implementation: torchtitan"), ("llama-tiny", "implementation: transformers")
NANO, MEGATRON = ("gpt-tiny", "implementation: nanogpt"), ("gpt-tiny", "implementation: megatron")
MIXED = "precision: {parameters: fp32, compute: bf16, reduce: fp32}"
HALF = "precision: {parameters: bf16, compute: bf16, reduce: bf16}"
CASES = {
    "one GPU": (NANO, "precision: {parameters: fp32, compute: bf16, autocast: true}"),
    "dropout": (("gpt-tiny", "implementation: nanogpt, dropout: 0.1"), "checkpoint: {every: 1}"),
    "loss scaling": (NANO, "precision: {parameters: fp32, compute: fp16, autocast: true, grad_scaler: true}"),
    "fsdp": (TITAN, f"parallel: {{fsdp: {{degree: 8}}}}\n{MIXED}"),
    "fsdp, reduced once": (TITAN, f"parallel: {{fsdp: {{degree: 8, gradient_sync: last}}}}\n{MIXED}"),
    "fsdp on the host": (TITAN, f"parallel: {{fsdp: {{degree: 8, cpu_offload: true}}}}\n{MIXED}"),
    "recomputed": (TITAN, "parallel: {fsdp: {degree: 8}}\ncheckpoint: {save: [attention, every_second_matmul]}"),
    "saved on the host": (TITAN, "offload: {what: saved_tensors}"),
    "streamed to the host": (TITAN, "offload: {what: activations}"),
    "compiled": (TITAN, "parallel: {fsdp: {degree: 8}}\ncompile: {}"),
    "transformers": (TRANSFORMERS, HALF),
    "ddp": (TRANSFORMERS, "parallel: {ddp: {degree: 8}}"),
    "ddp with views": (TRANSFORMERS, "parallel: {ddp: {degree: 8, gradient_as_bucket_view: true}}"),
    "fsdp1": (TRANSFORMERS, f"parallel: {{fsdp1: {{degree: 8}}}}\n{MIXED}"),
    "zero 1": (TRANSFORMERS, f"parallel: {{zero: {{degree: 8, stage: 1}}}}\n{HALF}"),
    "zero 2": (TRANSFORMERS, f"parallel: {{zero: {{degree: 8, stage: 2}}}}\n{HALF}"),
    "zero 3": (TRANSFORMERS, f"parallel: {{zero: {{degree: 8, stage: 3}}}}\n{HALF}"),
    "zero 2 on the host": (
        TRANSFORMERS, f"parallel: {{zero: {{degree: 8, stage: 2, offload_optimizer: cpu}}}}\n{HALF}"
    ),
    "tensor parallel": (MEGATRON, f"parallel: {{tensor: {{degree: 8, sequence_parallel: true}}}}\n{HALF}"),
    "data parallel": (
        MEGATRON, f"parallel: {{tensor: {{degree: 2}}, data: {{degree: 4, distributed_optimizer: true}}}}\n{HALF}"
    ),
    "overlapped": (MEGATRON, f"parallel: {{tensor: {{degree: 2}}, data: {{degree: 4, overlap: true}}}}\n{HALF}"),
    "experts": (
        ("mixtral-tiny", "implementation: megatron"),
        f"parallel: {{data: {{degree: 8, distributed_optimizer: true}}, expert: {{degree: 4}}}}\n{HALF}",
    ),
}  # fmt: skip


def setup_of(case: str) -> Setup:
    (preset, implementation), rest = CASES[case]
    text = TEXT.replace("PRESET", preset).replace("IMPLEMENTATION", implementation)
    return load_text(text.replace("GPUS", "8" if "parallel" in rest else "1") + rest, case).strategies[0]


@pytest.mark.parametrize("case", CASES)
def test_left_out_micro_batches_are_those_recorded(case: str) -> None:
    setup = setup_of(case)
    steps = steps_to_record(setup)
    assert_equal(record_training(setup, steps), record_training(setup, steps, stamps=False, folds=False))
