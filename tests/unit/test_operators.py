"""What a selective policy can meet in a block is what recording a block shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sim.model.config import ModelConfig
from sim.model.operators import block_operators
from sim.runtime.record import record
from sim.runtime.selective import Selective
from sim.scenario import load_text

COPIES = {"aten.clone", "aten._to_copy"}
LLAMA = ("", "attention: math", "norm: manual", "norm: fused", "qkv_bias: true", "qk_norm: true", "gqa: sdpa")
TITAN = ("rope: cos_sin", "rope: complex")
GPT = ("", "attention: math", "dropout: 0.0", "dropout: 0.1")
ACTIVATIONS = ("activation: gelu", "activation: gelu_tanh", "activation: gelu_new")
CASES = [
    *(("llama-tiny", "torchtitan", change) for change in LLAMA + TITAN),
    *(("llama-tiny", "transformers", change) for change in LLAMA),
    *(
        ("llama-tiny", "megatron", change)
        for change in ("", "qkv_bias: true", "kv_heads: 2", "qk_norm: true", "swiglu_fusion: false")
    ),
    *(("gpt-tiny", "nanogpt", change) for change in (*GPT, "bias: false", *ACTIVATIONS[:2])),
    *(("gpt-tiny", "transformers", change) for change in GPT + ACTIVATIONS),
    *(("gpt-tiny", "megatron", change) for change in (*GPT, "attention: sdpa", "bias: false")),
]


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize("preset, implementation, change", CASES)
def test_the_operators_of_a_block_are_those_that_run(
    preset: str, implementation: str, change: str, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if implementation == "megatron" and compute == "fp32":
        pytest.skip("megatron runs in 16 bit")
    (setup,) = load_text(
        f"model: {{preset: {preset}, implementation: {implementation}, {change}}}\n"
        "cluster: {gpu: h100, gpus_per_node: 1}\nbatch: {micro_batch: 1, seq_len: 64}\n"
        f"precision: {{parameters: {compute}, compute: {compute}}}\ncheckpoint: {{save: [aten.add]}}\n"
    ).strategies
    seen = set()
    original = Selective.dispatch

    def noting(self: Selective, aten: str, kernel: Callable[[], Any]) -> Any:
        seen.add(aten)
        return original(self, aten, kernel)

    monkeypatch.setattr(Selective, "dispatch", noting)
    record(setup, 1)
    assert isinstance(setup.model, ModelConfig)
    assert seen | COPIES == block_operators(setup.model, compute)
