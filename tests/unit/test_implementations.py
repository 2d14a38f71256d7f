"""Whose code is imitated decides what a scenario may ask for and what a wrapper wraps."""

from __future__ import annotations

import pytest

from sim.cost.gemm import is_misaligned
from sim.model.catalogue import ModelError, build_model, preset_shapes
from sim.program.kernels import Gemm
from sim.runtime.checkpoint import CheckpointWrapper
from sim.runtime.record import record
from sim.runtime.recorder import Recorder
from sim.runtime.regions import apply_checkpoint, layers_of
from sim.runtime.train import TrainingRun
from sim.scenario import ScenarioError, load_text

ONE_GPU = "cluster: {gpu: h100, gpus_per_node: 1}\nbatch: {micro_batch: 1, seq_len: 256}\n"


@pytest.mark.parametrize(
    ("preset", "implementation", "choice", "allowed"),
    [
        ("llama-tiny", "torchtitan", {"attention": "unfused"}, ("sdpa", "math")),
        ("llama-tiny", "transformers", {"rope": "complex"}, ("half",)),
        ("llama-tiny", "transformers", {"dropout": 0.1}, ("0.0",)),
        ("llama-tiny", "transformers", {"fp8_swiglu_input": True}, ("false",)),
        ("llama-tiny", "megatron", {"rope": "complex"}, ("fused",)),
        ("llama-tiny", "megatron", {"attention": "math"}, ("sdpa",)),
        ("gpt-tiny", "nanogpt", {"activation": "gelu_new"}, ("gelu", "gelu_tanh")),
        ("gpt-tiny", "megatron", {"logits": "keep_dtype"}, ("loss_upcast",)),
    ],
)
def test_a_choice_that_the_imitated_code_does_not_have_is_a_fault(
    preset: str, implementation: str, choice: dict[str, object], allowed: tuple[str, ...]
) -> None:
    with pytest.raises(ModelError) as caught:
        build_model(preset, preset_shapes(preset), implementation, choice)
    assert [(fault.field, fault.allowed) for fault in caught.value.faults] == [(next(iter(choice)), allowed)]


@pytest.mark.parametrize("precision", ["{compute: fp32, autocast: false}", "{autocast: true}"])
def test_megatrons_layers_run_in_16_bit_without_autocast(precision: str) -> None:
    model = "model: {preset: gpt-tiny, implementation: megatron}\n"
    text = f"{model}{ONE_GPU}precision: {precision}\nstrategies: {{s: {{}}}}\n"
    with pytest.raises(ScenarioError) as caught:
        load_text(text, "megatron")
    assert "megatron runs in 16 bit" in str(caught.value)


@pytest.mark.parametrize(
    ("implementation", "checkpointed"),
    [("torchtitan", [False, True, False, True]), ("transformers", [True, False, True, False])],
)
def test_of_every_two_layers_transformers_checkpoints_the_first_and_torchtitan_the_second(
    implementation: str, checkpointed: list[bool]
) -> None:
    text = f"model: {{preset: llama-tiny, implementation: {implementation}}}\n{ONE_GPU}"
    setup = load_text(text + "strategies: {s: {checkpoint: {every: 2}}}\n", "every").strategies[0]
    run = TrainingRun(setup, Recorder())
    apply_checkpoint(run.tape, run.model, setup.checkpoint)
    assert [isinstance(layer, CheckpointWrapper) for layer in layers_of(run.model)] == checkpointed


@pytest.mark.parametrize(
    ("implementation", "how"),
    [
        ("nanogpt", ""),
        ("nanogpt", "compile: {}\n"),
        ("transformers", ""),
        ("megatron", "precision: {parameters: bf16, compute: bf16}\n"),
    ],
)
def test_an_odd_vocabulary_misaligns_the_heads_three_products_alone(implementation: str, how: str) -> None:
    """Logits, the gradients of their input and of their weight."""
    model = f"model: {{preset: gpt-tiny, implementation: {implementation}, vocab: 8193}}\n"
    program = record(load_text(f"{model}{ONE_GPU}{how}strategies: {{s: {{}}}}\n", "odd").strategies[0], 1)
    products = [kernel.work for kernel in program.kernels if isinstance(kernel.work, Gemm)]
    misaligned = [work for work in products if is_misaligned(work)]
    assert len(misaligned) == 3
    assert all(8193 in (work.m, work.n, work.k) for work in misaligned)
    assert sum(8193 in (work.m, work.n, work.k) for work in products) == 3
