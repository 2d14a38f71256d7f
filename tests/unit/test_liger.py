"""Liger's kernels in a scenario: what they leave in memory, when they do nothing, what is refused."""

from __future__ import annotations

import pytest

from sim.program.program import Mem, Owner
from sim.report.levers import measure_against
from sim.runtime.ops.liger import tokens_per_chunk
from sim.runtime.record import record
from sim.runtime.train import record_training
from sim.scenario import load_text
from sim.scenario.setup import Setup
from tests.exact.test_stamps import assert_equal
from tests.unit.scenario_texts import problems

TEXT = """
model: {preset: PRESET, implementation: transformers, layers: 9, liger: KERNELS}
cluster: {gpu: h100, gpus_per_node: 1}
batch: {micro_batch: 1, seq_len: 512}
precision: {parameters: bf16, compute: bf16}
"""
LOSS = "fused_linear_cross_entropy"
GIB = 1 << 30


def text_of(kernels: str = "all", more: str = "", preset: str = "llama-tiny") -> str:
    return TEXT.replace("KERNELS", kernels).replace("PRESET", preset) + more


def setup_of(kernels: str = "all", more: str = "", preset: str = "llama-tiny") -> Setup:
    return load_text(text_of(kernels, more, preset), "liger").strategies[0]


@pytest.mark.parametrize(
    ("tokens", "hidden", "vocab", "chunk"),
    [
        (4 * 4096, 4096, 32000, 2048),  # the comment in Liger's source
        (8192, 4096, 128256, 256),
        (100, 4096, 2048, 100),
        (1500, 512, 5000, 256),
    ],
)
def test_chunks_hold_about_as_many_logits_as_hidden_states(tokens: int, hidden: int, vocab: int, chunk: int) -> None:
    assert tokens_per_chunk(tokens, hidden, vocab) == chunk


def largest_of_the_loss(kernels: str) -> list[int]:
    """Bytes of its tensors of Llama-3.1-8B at 8,192 tokens, the largest first."""
    text = text_of(kernels, preset="llama-3.1-8b, vocab: 128256").replace("layers: 9", "layers: 1")
    program = record(load_text(text.replace("512", "8192"), "liger").strategies[0], steps=1)
    sizes = program.mem_bytes[program.mem_kind == Mem.ALLOC].tolist()
    return sorted((size for size, owner in zip(sizes, program.owners) if owner == Owner.LOSS), reverse=True)


def test_lg_the_fused_loss_keeps_both_gradients_and_a_chunk_of_logits() -> None:
    """8,192 x 128,256 logits are 1.957 GiB in 16 bit and 3.914 GiB in fp32 (LG-01); of Liger's a 32nd exists at a time."""
    whole, fused = largest_of_the_loss("[]"), largest_of_the_loss(f"[{LOSS}]")
    assert whole[0] / GIB == pytest.approx(3.914, abs=0.001)
    of_hidden, chunk = 2 * 8192 * 4096, 2 * 256 * 128_256
    assert fused[:2] == [of_hidden, chunk]  # the weight's gradient, 2 x 128,256 x 4,096, becomes its .grad


def test_evaluation_makes_logits() -> None:
    plain, fused = (record(setup_of(kernels, "mode: no_grad\n"), 1) for kernels in ("[]", f"[{LOSS}]"))
    assert_equal(fused, plain)


@pytest.mark.parametrize("more", ["", "checkpoint: {every: 1}\n", "parallel: {fsdp: {degree: 1}}\n"])
def test_stamped_layers_are_equal_to_live_ones(more: str) -> None:
    setup = setup_of("all", more)
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


def test_the_measure_against_a_large_loss_is_liger_s() -> None:
    assert measure_against(Owner.LOSS, setup_of("[rope]")) == f"Liger's fused loss (model.liger: [{LOSS}])"
    assert measure_against(Owner.LOSS, setup_of()) is None


@pytest.mark.parametrize(
    ("kernels", "more", "says"),
    [
        ("[ropes]", "", "ropes is none of rope, rms_norm, swiglu, fused_linear_cross_entropy (or all)"),
        ("3", "", "a name or a list of names is expected"),
        ("all", "compile: {}\n", "eager mode only"),
        ("all, lora: {rank: 8, targets: [head]}", "", "would pass its adapter by"),
    ],
)
def test_what_does_not_fit_is_told(kernels: str, more: str, says: str) -> None:
    found = problems(text_of(kernels, more))
    assert any(path == "model.liger" and says in text for _, path, text in found), found


@pytest.mark.parametrize("preset", ["llama-tiny, implementation: torchtitan", "gpt-tiny"])
def test_other_code_has_none(preset: str) -> None:
    text = text_of(preset=preset).replace(", implementation: transformers, layers", ", layers")
    assert [path for _, path, _ in problems(text)] == ["model.liger"]
