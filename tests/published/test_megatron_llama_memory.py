"""Bytes that a Llama layer of Megatron saves on one rank, against the closed form, compared with ==.

h hidden, f ffn, A heads, K kv heads, d head dim, t tensor-parallel ranks, s tokens of a sequence, b sequences; 16 bit.
Per token: two norms keep their input (2 h each) and an fp32 reciprocal deviation (4), the two products behind them what
they read (2 h each); attention q, k, v, its result and an fp32 log-sum-exp per head; the MLP the input of its fused
SwiGLU (gate and value, 4 f) and that of its second product (2 f).
"""

from __future__ import annotations

import pytest

from sim.model.build import build_model
from sim.model.config import ModelConfig
from sim.model.shard.tensor import TensorParallel
from sim.program.program import Owner
from sim.runtime.record import record
from sim.scenario import load_text
from sim.scenario.setup import Setup
from tests.published.korthikanti import alive_bytes

RNG_BYTES = 16


def setup_of(preset: str, layers: int, parallel: str, more: str = "", batch: int = 2, seq_len: int = 512) -> Setup:
    text = (
        f"model: {{preset: {preset}, implementation: megatron, layers: {layers}}}\n"
        f"cluster: {{gpu: h100, gpus_per_node: 8}}\nbatch: {{micro_batch: {batch}, seq_len: {seq_len}}}\n"
        f"parallel: {parallel}\nprecision: {{parameters: bf16, compute: bf16}}\noptimizer: null\n{more}\n"
    )
    return load_text(text, "megatron-llama").strategies[0]


def saved_per_layer(preset: str, parallel: str, more: str = "") -> int:
    three, four = (record(setup_of(preset, layers, parallel, more), steps=1) for layers in (3, 4))
    owners = (Owner.ACTIVATION, Owner.CHECKPOINT)
    return alive_bytes(four, "s0.fwd0", owners) - alive_bytes(three, "s0.fwd0", owners)


def closed_form(config: ModelConfig, t: int, sequence_parallel: bool, s: int = 512, b: int = 2) -> dict[str, int]:
    """Bytes of each kind of tensor on one rank."""
    h, f, heads, kv_heads, d = config.hidden, config.ffn_hidden, config.heads, config.kv_heads, config.head_dim
    tokens, split = s * b, t if sequence_parallel else 1
    return {
        "norms' inputs": 2 * 2 * h * tokens // split,
        "statistics": 2 * 4 * tokens // split,
        "norms' results": 2 * 2 * h * tokens // split,
        "q and result": 2 * 2 * heads * d * tokens // t,
        "k and v": 2 * 2 * kv_heads * d * tokens // t,
        "log-sum-exp": 4 * heads * tokens // t,
        "random state": RNG_BYTES,
        "swiglu's input": 4 * f * tokens // t,
        "swiglu's result": 2 * f * tokens // t,
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize("preset", ["llama-2-7b", "llama-3.1-8b"])
def test_a_layer_saves_the_closed_form(preset: str, t: int, sequence_parallel: bool) -> None:
    parallel = f"{{data: {{degree: {8 // t}}}"
    parallel += f", tensor: {{degree: {t}, sequence_parallel: {str(sequence_parallel).lower()}}}}}" if t > 1 else "}"
    config = setup_of(preset, 1, parallel).model
    assert isinstance(config, ModelConfig)
    assert saved_per_layer(preset, parallel) == sum(closed_form(config, t, sequence_parallel).values())


@pytest.mark.parametrize("t", [1, 8])
def test_squared_relu_keeps_its_input_and_its_result_without_a_gate(t: int) -> None:
    parallel = f"{{data: {{degree: {8 // t}}}" + (f", tensor: {{degree: {t}}}}}" if t > 1 else "}")
    config = setup_of("nemotron-8b", 1, parallel).model
    assert isinstance(config, ModelConfig)
    expected = closed_form(config, t, False)
    gate = expected["swiglu's input"] // 2
    mean = expected["statistics"]  # a layer norm keeps the mean too
    assert saved_per_layer("nemotron-8b", parallel) == sum(expected.values()) - gate + mean


def test_thrown_away_norms_and_activations_are_not_saved() -> None:
    parallel = "{data: {degree: 4}, tensor: {degree: 2, sequence_parallel: true}}"
    config = setup_of("llama-3.1-8b", 1, parallel).model
    assert isinstance(config, ModelConfig)
    expected = closed_form(config, 2, True)
    kept = sum(expected.values()) - expected["norms' results"] - expected["swiglu's result"]
    saved = saved_per_layer("llama-3.1-8b", parallel, "checkpoint: {discard: [norm, activation]}")
    assert saved == kept - expected["statistics"]


def test_written_out_silu_of_the_gate_is_one_more_tensor() -> None:
    parallel = "{data: {degree: 4}, tensor: {degree: 2, sequence_parallel: true}}"
    config = setup_of("llama-3.1-8b", 1, parallel).model
    assert isinstance(config, ModelConfig)
    expected = closed_form(config, 2, True)
    saved = saved_per_layer("llama-3.1-8b, swiglu_fusion: false", parallel)
    assert saved == sum(expected.values()) + expected["swiglu's result"]
    discarded = saved_per_layer("llama-3.1-8b, swiglu_fusion: false", parallel, "checkpoint: {discard: activation}")
    assert discarded == sum(expected.values()) - expected["swiglu's result"]


def test_a_recomputed_layer_saves_its_input() -> None:
    parallel = "{data: {degree: 4}, tensor: {degree: 2, sequence_parallel: true}}"
    saved = saved_per_layer("llama-3.1-8b", parallel, "checkpoint: {reentrant: true}")
    assert saved == 2 * 4096 * 512 * 2 // 2


def test_core_attention_recomputed_saves_the_product_that_holds_q_k_and_v_and_not_the_log_sum_exp() -> None:
    """q and k are the rotated ones; v is a view of the product for all three."""
    parallel = "{data: {degree: 4}, tensor: {degree: 2, sequence_parallel: true}}"
    config = setup_of("llama-3.1-8b", 1, parallel).model
    assert isinstance(config, ModelConfig)
    expected, tokens, d = closed_form(config, 2, True), 1024, config.head_dim
    for part in ("log-sum-exp", "random state"):
        expected.pop(part)
    copy_of_v, product = (
        2 * config.kv_heads * d * tokens // 2,
        2 * (config.heads + 2 * config.kv_heads) * d * tokens // 2,
    )
    saved = saved_per_layer("llama-3.1-8b", parallel, "checkpoint: {inside: core_attention, reentrant: true}")
    assert saved == sum(expected.values()) - copy_of_v + product


@pytest.mark.parametrize(("preset", "millions"), [("llama-2-7b", 6738), ("llama-3.1-8b", 8030), ("qwen2.5-7b", 7615)])
def test_parameters_are_those_of_the_published_model(preset: str, millions: int) -> None:
    config = setup_of(preset, 32 if "llama" in preset else 28, "{data: {degree: 8}}").model
    assert isinstance(config, ModelConfig)
    assert sum(p.elements for p in build_model(config).parameters()) // 10**6 == millions


def test_ranks_split_heads_and_both_halves_of_the_gated_product() -> None:
    config = setup_of("llama-3.1-8b", 1, "{data: {degree: 8}}").model
    assert isinstance(config, ModelConfig)
    shapes = {name: slot.shape for name, slot in build_model(config, TensorParallel(4)).named_parameters()}
    layer = {name.removeprefix("layers.0."): shape for name, shape in shapes.items() if name.startswith("layers.0.")}
    assert layer == {
        "input_layernorm.weight": (4096,),
        "self_attention.linear_proj.weight": (4096, 1024),
        "self_attention.linear_qkv.weight": ((32 + 2 * 8) * 128 // 4, 4096),
        "pre_mlp_layernorm.weight": (4096,),
        "mlp.linear_fc1.weight": (2 * 14336 // 4, 4096),
        "mlp.linear_fc2.weight": (4096, 14336 // 4),
    }


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kind", ["ring", "all-gather"])
@pytest.mark.parametrize("preset", ["llama-2-7b", "llama-3.1-8b"])
def test_under_context_parallelism_a_layer_saves_the_closed_form_of_its_tokens(preset: str, kind: str, n: int) -> None:
    """Whatever has gone round in a ring, one pair of keys and values is saved; gathered ones are gathered again. The
    all-gather saves the result of attention a second time, half by half. A random state is kept per kernel."""
    parallel = f"{{context: {{degree: {n}, kind: {kind}}}, tensor: {{degree: {8 // n}, sequence_parallel: true}}}}"
    config = setup_of(preset, 1, parallel).model
    assert isinstance(config, ModelConfig)
    expected = closed_form(config, 8 // n, True, s=512 // n)
    expected["random state"] *= n if kind == "ring" else 2
    if kind == "all-gather":
        expected["results by halves"] = expected["q and result"] // 2
    assert saved_per_layer(preset, parallel) == sum(expected.values())
