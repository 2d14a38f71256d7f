"""Activations kept in 8 bit: Megatron's activation_func_fp8_input_store."""

from __future__ import annotations

import pytest

from sim.model.config import ModelConfig
from sim.program.program import Owner
from sim.runtime.train import record_training
from sim.scenario import load_text
from sim.scenario.setup import Setup
from tests.exact.test_stamps import assert_equal
from tests.unit.scenario_texts import problems
from tests.unit.test_fp8 import saved_bytes

LAYERS, TOKENS = 6, 2 * 256
TEXT = """
model: {preset: PRESET, implementation: megatron, layers: 6, fp8_swiglu_input: STORED}
cluster: {gpu: h100, gpus_per_node: 8}
batch: {micro_batch: 2, seq_len: 256, accumulation: 2}
precision: {parameters: bf16, compute: bf16}
parallel: {data: {degree: 4}, tensor: {degree: 2, sequence_parallel: true}}
"""


def setup_of(stored: str, preset: str = "llama-tiny") -> Setup:
    return load_text(TEXT.replace("STORED", stored).replace("PRESET", preset), "stored").strategies[0]


def test_what_swiglu_reads_is_kept_in_half_the_bytes() -> None:
    """Of [S, B, 2 F / t] one byte each instead of two; everything else stays."""
    plain, stored = setup_of("false"), setup_of("true")
    assert isinstance(plain.model, ModelConfig)
    assert saved_bytes(plain) - saved_bytes(stored) == LAYERS * TOKENS * 2 * plain.model.ffn_hidden // 2
    assert saved_bytes(plain, Owner.PARAMETER) == saved_bytes(stored, Owner.PARAMETER)


def test_experts_keep_it_in_8_bit_too() -> None:
    plain, stored = (setup_of(on, "mixtral-tiny") for on in ("false", "true"))
    assert isinstance(plain.model, ModelConfig) and plain.model.experts is not None
    rows = TOKENS * plain.model.experts.top_k
    assert saved_bytes(plain) - saved_bytes(stored) == LAYERS * rows * 2 * plain.model.experts.ffn_hidden // 2


def test_stamped_layers_are_equal_to_live_ones() -> None:
    setup = setup_of("true")
    assert_equal(record_training(setup, 3, stamps=True), record_training(setup, 3, stamps=False))


@pytest.mark.parametrize(
    ("old", "new"),
    [("implementation: megatron", "implementation: torchtitan"), ("layers: 6", "layers: 6, swiglu_fusion: false"),
     ("llama-tiny", "gpt-tiny"), ("layers: 6", "layers: 6, activation: squared_relu")],
)  # fmt: skip
def test_it_is_of_the_fused_swiglu_alone(old: str, new: str) -> None:
    text = TEXT.replace("STORED", "true").replace("PRESET", "llama-tiny").replace(old, new)
    assert any(path == "model.fp8_swiglu_input" for _, path, _ in problems(text))
