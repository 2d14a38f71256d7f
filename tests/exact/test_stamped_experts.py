"""Stamped layers with experts give the program that recording every layer gives."""

from __future__ import annotations

import pytest

from sim.runtime.train import record_training
from sim.runtime.train_pipeline import record_pipeline
from tests.exact.test_stamps import assert_equal, setup_of

EXPERTS = """
model: {preset: PRESET, implementation: megatron, layers: 9, experts: {CHANGES}}
cluster: {gpu: h100, gpus_per_node: 8}
batch: {micro_batch: 1, seq_len: 128, accumulation: 3}
precision: {parameters: bf16, compute: bf16}
"""
PARALLEL = {
    "one rank per expert": "{data: {degree: 8, distributed_optimizer: true}, expert: {degree: 8}}",
    "replicas": "{data: {degree: 8, overlap: true}, expert: {degree: 2}}",
    "beside tensor": "{tensor: {degree: 2, sequence_parallel: true}, data: {degree: 4}, expert: {degree: 4, tensor: 1}}",
    "shared matrices": "{tensor: {degree: 2, sequence_parallel: true}, data: {degree: 4}, expert: {degree: 4}}",
}
CHECKPOINTS = {
    "none": "null",
    "full": "{reentrant: true}",
    "moe": "{inside: moe, reentrant: true}",
    "norm and activation": "{discard: [norm, activation]}",
    "core attention": "{inside: core_attention, reentrant: true}",
}


def text_of(preset: str, changes: str = "imbalance: 1.5") -> str:
    return EXPERTS.replace("PRESET", preset).replace("CHANGES", changes)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("preset", ["mixtral-tiny", "deepseek-tiny"])
def test_experts_over_ranks(preset: str, parallel: str, checkpoint: str) -> None:
    setup = setup_of(f"{text_of(preset)}parallel: {PARALLEL[parallel]}\ncheckpoint: {CHECKPOINTS[checkpoint]}\n")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


@pytest.mark.parametrize("changes", ["permute_fusion: false, auxiliary_loss: true", "capacity_factor: 1.0"])
def test_other_routers(changes: str) -> None:
    setup = setup_of(f"{text_of('deepseek-tiny', changes)}parallel: {PARALLEL['replicas']}\n")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


GPT = "count: 8, top_k: 1, ffn_hidden: 64, sinkhorn: true, dispatcher: allgather"


@pytest.mark.parametrize("grouped", ["true", "false"])
@pytest.mark.parametrize("parallel", PARALLEL)
def test_experts_of_a_gpt_that_gets_all_tokens(parallel: str, grouped: str) -> None:
    text = text_of("gpt-tiny", f"{GPT}, grouped: {grouped}").replace("layers: 9", "layers: 9, bias: false")
    setup = setup_of(f"{text}parallel: {PARALLEL[parallel]}\n")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


def test_experts_in_pipeline_stages() -> None:
    """The plain layers are all in the first stage."""
    parallel = "{data: {degree: 4}, expert: {degree: 4}, pipeline: {degree: 2, schedule: interleaved}}"
    text = (
        text_of("deepseek-tiny", "dense_layers: 2")
        .replace("layers: 9", "layers: 8")
        .replace("accumulation: 3", "accumulation: 4")
    )
    setup = setup_of(f"{text}parallel: {parallel}\n")
    for rank in range(2):
        assert_equal(record_pipeline(setup, rank, 2, stamps=True), record_pipeline(setup, rank, 2, stamps=False))


@pytest.mark.parametrize("checkpoint", ["null", "{every: 1}", "{save: [aten._grouped_mm, attention]}"])
@pytest.mark.parametrize("fsdp", ["", "parallel: {fsdp: {degree: 8}}"])
def test_transformers_experts(fsdp: str, checkpoint: str) -> None:
    text = text_of("mixtral-tiny").replace("megatron", "transformers")
    if not fsdp:
        text = text.replace("gpus_per_node: 8", "gpus_per_node: 1")
    setup = setup_of(f"{text}{fsdp}\ncheckpoint: {checkpoint}\n")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))
