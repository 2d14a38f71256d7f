"""Stamped layers with frozen weights and adapters give the program that recording every layer gives."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest

from sim.program.program import Mem, Program
from sim.runtime.train import record_training
from sim.runtime.train_pipeline import record_pipeline
from tests.exact.test_stamps import assert_equal, setup_of

TEXT = """
model: {preset: llama-tiny, implementation: IMPLEMENTATION, layers: 9, TRAINED}
cluster: {gpu: h100, gpus_per_node: 8}
batch: {micro_batch: 1, seq_len: 256, accumulation: 2}
precision: {parameters: fp32, compute: bf16, reduce: fp32, autocast: false}
parallel: {PARALLEL}
checkpoint: CHECKPOINT
"""
TRAINED = {
    "adapters": "lora: {rank: 8}",
    "adapters with dropout": "lora: {rank: 4, targets: [all, head], dropout: 0.1}",
    "trained embedding output": "input_gradients: true, lora: {rank: 4, targets: mlp}",
    "frozen first layers": 'frozen: ["*embed*", "layers.[0-3].*"]',
    "frozen norms": 'frozen: ["*norm*"]',
}
CHECKPOINTS = {"none": "null", "full": "{}", "reentrant": "{reentrant: true}", "selective": "{save: [aten.mm]}"}


def text_of(implementation: str, trained: str, parallel: str, checkpoint: str) -> str:
    text = TEXT.replace("IMPLEMENTATION", implementation).replace("TRAINED", trained)
    return text.replace("PARALLEL", parallel).replace("CHECKPOINT", checkpoint)


def frees_sorted(program: Program) -> Program:
    """Frees between two allocations in the order of their handles: as a graph dies, their order is of no consequence."""
    handles = program.mem_handle.copy()
    for is_free, run in groupby(range(len(handles)), lambda event: program.mem_kind[event] == Mem.FREE):
        if is_free:
            events = list(run)
            handles[events] = np.sort(handles[events])
    return replace(program, mem_handle=handles)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("implementation", ["torchtitan", "transformers"])
def test_under_fsdp(implementation: str, trained: str, checkpoint: str) -> None:
    what = TRAINED[trained]
    if checkpoint == "reentrant" and "input_gradients" not in what:
        what = f"input_gradients: true, {what}"
    setup = setup_of(text_of(implementation, what, "fsdp: {degree: 8}", CHECKPOINTS[checkpoint]))
    stamped, live = (record_training(setup, 3, stamps=stamps) for stamps in (True, False))
    if checkpoint == "reentrant":
        stamped, live = frees_sorted(stamped), frees_sorted(live)
    assert_equal(stamped, live)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("trained", TRAINED)
def test_on_one_gpu_in_16_bit(trained: str, checkpoint: str) -> None:
    text = text_of("transformers", TRAINED[trained], "", CHECKPOINTS[checkpoint])
    text = text.replace("gpus_per_node: 8", "gpus_per_node: 1").replace("parameters: fp32", "parameters: bf16")
    setup = setup_of(text)
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("double", ["true", "false"])
def test_four_bit_weights(double: str, checkpoint: str) -> None:
    trained = f"lora: {{rank: 8, targets: attention, base: nf4, double_quantization: {double}, dropout: 0.1}}"
    text = text_of("transformers", trained, "", CHECKPOINTS[checkpoint])
    text = text.replace("gpus_per_node: 8", "gpus_per_node: 1").replace("parameters: fp32", "parameters: bf16")
    setup = setup_of(text)
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_pipeline_stages(schedule: str) -> None:
    parallel = f"pipeline: {{degree: 2, schedule: {schedule}}}, fsdp: {{degree: 4}}"
    text = text_of("torchtitan", TRAINED["adapters"], parallel, "{}")
    setup = setup_of(text.replace("layers: 9", "layers: 12").replace("accumulation: 2", "accumulation: 4"))
    for rank in range(2):
        assert_equal(record_pipeline(setup, rank, 3, stamps=True), record_pipeline(setup, rank, 3, stamps=False))
