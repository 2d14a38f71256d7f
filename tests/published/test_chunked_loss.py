"""Chunked losses: bytes per token and entry of the vocabulary (b s V), against published figures and measurements."""

from __future__ import annotations

import numpy as np
import pytest

from sim.program.program import Mem, Owner, Program
from sim.runtime.record import record
from sim.scenario import load_text

TEXT = """
model: {preset: qwen2.5-1.5b, implementation: torchtitan, layers: 1, tied_embeddings: false, LOSS}
cluster: {gpu: h100, gpus_per_node: 1}
batch: {micro_batch: 1, seq_len: 8192}
precision: {parameters: bf16, compute: bf16}
optimizer: null
"""
GIB = 1 << 30
ELEMENTS = 8192 * 151_936


def loss_bytes(loss: str, parallel: str = "null") -> tuple[int, int]:
    """Peak of what belongs to the loss on the last rank, and the largest of its tensors."""
    setup = load_text(TEXT.replace("LOSS", loss) + f"parallel: {parallel}\n", "loss").strategies[0]
    program = record(setup, steps=1, rank=setup.stages - 1)
    return of_loss(program)


def of_loss(program: Program) -> tuple[int, int]:
    allocates, handles = program.mem_kind == Mem.ALLOC, program.mem_handle
    sizes = np.zeros(len(program.owners), np.int64)
    sizes[handles[allocates]] = program.mem_bytes[allocates]
    sizes *= np.array(program.owners) == Owner.LOSS
    return int(np.cumsum(np.where(allocates, sizes[handles], -sizes[handles])).max()), int(sizes.max())


def test_a_whole_loss_holds_twelve_bytes_per_element() -> None:
    peak, largest = loss_bytes("loss_chunks: 1")
    assert round(peak / ELEMENTS, 3) == 12
    assert largest == 4 * ELEMENTS


def test_chunks_of_1024_tokens_shrink_logits_as_published() -> None:
    """LG-03, ISEEKYAN/Megatron-LM#132: 4.638 GiB of fp32 logits whole, 0.580 GiB per chunk."""
    assert loss_bytes("loss_chunks: 1")[1] / GIB == pytest.approx(4.638, abs=0.002)
    assert loss_bytes("loss_chunks: 8")[1] / GIB == pytest.approx(0.580, abs=0.001)


@pytest.mark.parametrize(
    "parallel",
    ["{ddp: {degree: 1}}", "{fsdp1: {degree: 1}}", "{zero: {degree: 1, stage: 2}}", "{zero: {degree: 1, stage: 3}}"],
)
@pytest.mark.parametrize("chunking", ["projection", "logits"])
def test_sharding_families_chunk_the_loss_as_one_gpu_does(chunking: str, parallel: str) -> None:
    loss = f"loss_chunks: 4, loss_chunking: {chunking}"
    assert loss_bytes(loss, parallel) == loss_bytes(loss)


@pytest.mark.parametrize("chunking", ["projection", "logits"])
def test_the_last_stage_chunks_the_loss_and_keeps_its_logits(chunking: str) -> None:
    """PipelineStage holds what forward returned until its backward: 2 bytes per element beside the loss's own."""
    loss = f"loss_chunks: 4, loss_chunking: {chunking}"
    alone = loss_bytes(loss + ", keep_logits: true")
    text = TEXT.replace("layers: 1", "layers: 2").replace("gpus_per_node: 1", "gpus_per_node: 2").replace("LOSS", loss)
    setup = load_text(text + "parallel: {pipeline: {degree: 2}}\n", "loss").strategies[0]
    assert of_loss(record(setup, steps=1, rank=1)) == alone


def test_only_a_backward_per_chunk_frees_the_log_probabilities() -> None:
    whole, logits, projection, backward = (
        loss_bytes(loss)[0] / ELEMENTS
        for loss in (
            "loss_chunks: 1", "loss_chunks: 4, loss_chunking: logits", "loss_chunks: 4, loss_chunking: projection",
            "loss_chunks: 4",
        )
    )  # fmt: skip
    assert whole > logits and whole > projection
    assert min(logits, projection) > 4 > backward
