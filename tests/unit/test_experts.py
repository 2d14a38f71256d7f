"""Mixture of experts: parameters, who holds which experts, what is exchanged, and what a scenario may ask for."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.api import simulate_setup
from sim.hardware import Span
from sim.model.build import build_model
from sim.model.catalogue import build_model as config_of
from sim.model.catalogue import preset_shapes
from sim.model.experts import Experts, rows_of
from sim.model.faults import ModelError
from sim.model.flops import active_parameter_count, model_flops_per_token, parameter_count
from sim.program.kernels import Attention, Collective, Gemm
from sim.program.program import Owner, Program, Row
from sim.runtime.record import record
from sim.runtime.train_pipeline import stage_config
from sim.scenario import load_text
from sim.scenario.setup import Setup
from tests.unit.scenario_texts import problems

TEXT = """\
model: {preset: PRESET, implementation: megatron, experts: {EXPERTS}}
cluster: {gpu: h100, gpus_per_node: 8, nodes: 2}
batch: {micro_batch: 1, seq_len: 256}
precision: {parameters: bf16, compute: bf16}
parallel: PARALLEL
"""
SPREAD = "{data: {degree: 16, distributed_optimizer: true}, expert: {degree: 8}}"
BESIDE_TENSOR = "{tensor: {degree: 2, sequence_parallel: true}, data: {degree: 8}, expert: {degree: 8, tensor: 1}}"
H, F, V, L, E, K = 512, 768, 8192, 4, 8, 2
"""Of mixtral-tiny: hidden, width of an expert, vocabulary, layers, experts, experts per token."""


def text_of(parallel: str, experts: str = "imbalance: 1", preset: str = "mixtral-tiny") -> str:
    return TEXT.replace("PRESET", preset).replace("EXPERTS", experts).replace("PARALLEL", parallel)


def setup_of(parallel: str, experts: str = "imbalance: 1", preset: str = "mixtral-tiny") -> Setup:
    return load_text(text_of(parallel, experts, preset), "experts").strategies[0]


def program_of(setup: Setup, steps: int = 1) -> Program:
    return record(setup, steps)


def met(program: Program) -> Counter[Collective]:
    rows = program.row_argument[program.row_kind == Row.COLLECTIVE].tolist()
    return Counter(program.collectives[row] for row in rows)


# Parameters


@pytest.mark.parametrize(
    ("preset", "billions", "active"),
    [
        ("mixtral-8x7b", 46.7, 12.9),
        ("mixtral-8x22b", 140.6, 39.1),
        ("qwen1.5-moe-a2.7b", 14.3, 2.7),
        ("qwen2-57b-a14b", 57.4, 14.2),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235.1, 22.2),
        ("deepseek-v2", 235.7, 21.4),
        ("deepseek-v2-lite", 15.7, 2.7),
        ("deepseek-v3", 671.0, 37.6),
        ("llama-4-scout", 107.8, 17.2),
        ("llama-4-maverick", 400.7, 17.2),
        ("gpt-oss-20b", 20.9, 4.2),
        ("gpt-oss-120b", 116.8, 5.7),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset: str, billions: float, active: float) -> None:
    """To a decimal, from the models' cards; active ones with both embedding tables."""
    config = config_of(preset, preset_shapes(preset))
    assert round(parameter_count(config) / 1e9, 1) == billions
    assert active_parameter_count(config) / 1e9 == pytest.approx(active, abs=0.06)


def test_every_second_layer_of_gpt_oss_sees_its_window_alone() -> None:
    setup = setup_of("{data: {degree: 16}}", experts="count: 4", preset="gpt-oss-20b, layers: 4")
    work = [kernel.work for kernel in program_of(setup).kernels if isinstance(kernel.work, Attention)]
    assert Counter((w.window, w.backward) for w in work) == {(n, b): 1 for n in (0, 128) for b in (False, True)}


@pytest.mark.parametrize(("first", "layers", "expected"), [(0, 6, [1, 3, 5]), (3, 3, [0, 2]), (4, 2, [1])])
def test_of_every_two_layers_the_second_has_experts_in_stages_too(first: int, layers: int, expected: list[int]) -> None:
    config = config_of(
        "mixtral-tiny", {**preset_shapes("mixtral-tiny"), "layers": 6}, "megatron", {"experts": {"every": 2}}
    )
    stage = stage_config(config, first, layers)
    assert [layer for layer in range(layers) if stage.has_experts(layer)] == expected
    model = vars(build_model(stage))["layers"]
    assert [number for number, layer in enumerate(model) if vars(layer)["moe"] is not None] == expected


def test_windows_alternate_over_stages() -> None:
    config = config_of("gpt-oss-20b", {**preset_shapes("gpt-oss-20b"), "layers": 6})
    assert [stage_config(config, 3, 3).window_of(layer) for layer in range(3)] == [0, 128, 0]


def test_every_is_megatrons_and_no_more_than_the_layers() -> None:
    shapes = {**preset_shapes("mixtral-tiny"), "layers": 4}
    with pytest.raises(ModelError, match=r"no layer would have experts"):
        config_of("mixtral-tiny", shapes, "megatron", {"experts": {"every": 5}})
    with pytest.raises(ModelError, match=r"is Megatron's"):
        config_of("mixtral-tiny", shapes, "transformers", {"experts": {"every": 2}})


def test_mfu_counts_no_more_keys_than_the_window_has() -> None:
    config = config_of("gpt-oss-20b", preset_shapes("gpt-oss-20b"))
    pair = 12 * config.heads * config.head_dim
    short, long = (model_flops_per_token(config, length) for length in (128, 8192))
    assert long - short == pair * config.layers // 2 * (8192 - 128)


def test_parameters_of_mixtral_and_deepseek_by_hand() -> None:
    h, layers, vocab = 4096, 32, 32000
    mixtral = 2 * vocab * h + h + layers * (2 * h + 2 * h * h + 2 * h * 1024 + 8 * h + 8 * 3 * h * 14336)
    assert parameter_count(config_of("mixtral-8x7b", preset_shapes("mixtral-8x7b"))) == mixtral == 46_702_792_704
    h, heads, vocab = 7168, 128, 129280
    attention = h * 1536 + 1536 + 1536 * heads * 192 + h * 576 + 512 + 512 * heads * 256 + heads * 128 * h
    norms, dense, experts = 2 * h, 3 * h * 18432, 256 * h + 257 * 3 * h * 2048
    deepseek = 2 * vocab * h + h + 61 * (attention + norms) + 3 * dense + 58 * experts
    config = config_of("deepseek-v3", preset_shapes("deepseek-v3"))
    assert parameter_count(config) == deepseek == 671_026_404_352
    assert active_parameter_count(config) == deepseek - 58 * 248 * 3 * h * 2048


def test_mfu_counts_the_experts_that_a_token_passes() -> None:
    config = config_of("mixtral-tiny", preset_shapes("mixtral-tiny"))
    dense = parameter_count(config) - L * E * 3 * H * F - V * H
    assert model_flops_per_token(config, 100) == 6 * (dense + L * K * 3 * H * F) + 12 * L * H * 100
    latent = config_of("deepseek-tiny", preset_shapes("deepseek-tiny"))
    difference = model_flops_per_token(latent, 1001) - model_flops_per_token(latent, 1000)
    assert difference == 6 * L * 8 * (64 + 32 + 64)


# Tokens


@given(
    count=st.integers(1, 8).map(lambda n: 8 * n), top_k=st.integers(1, 8), tokens=st.integers(1, 9000),
    ranks=st.sampled_from([1, 2, 4, 8]),
)  # fmt: skip
def test_balanced_ranks_share_all_copies(count: int, top_k: int, tokens: int, ranks: int) -> None:
    experts = Experts(count=count, top_k=top_k, ffn_hidden=1)
    groups = experts.groups_of_rank(tokens, ranks)
    assert sum(number for number, _ in groups) == count // ranks
    assert rows_of(groups) == tokens * top_k == experts.sent(tokens)


def test_the_busiest_expert_gets_its_share_and_the_others_what_is_left() -> None:
    experts = Experts(count=8, top_k=2, ffn_hidden=1, imbalance=2.4)
    assert experts.groups_of_rank(1000, 1) == ((1, 600), (7, 200))
    assert experts.groups_of_rank(1000, 8) == ((1, 4800),)
    assert experts.groups_of_rank(1000, 4) == ((1, 2400), (1, 800))


def test_a_capacity_drops_what_comes_on_top() -> None:
    experts = Experts(count=8, top_k=2, ffn_hidden=1, imbalance=2.4, capacity_factor=1.2)
    assert experts.groups_of_rank(1000, 1) == ((1, 300), (7, 200))
    assert experts.sent(1000) == 1700


# Ranks


def test_experts_number_the_ranks_anew() -> None:
    """Megatron's order: expert-tensor fastest, then expert, replicas of experts, pipeline."""
    mesh = setup_of(BESIDE_TENSOR).mesh
    assert [mesh.degree(name) for name in ("dp", "tp", "edp", "ep", "etp")] == [8, 2, 2, 8, 1]
    assert mesh.span("ep") == Span(8, 1, 8)
    assert mesh.span("edp") == Span(2, 2, 1)
    shared = setup_of(BESIDE_TENSOR.replace(", tensor: 1", "")).mesh
    assert [shared.degree(name) for name in ("edp", "ep", "etp")] == [1, 8, 2]
    assert shared.span("ep") == Span(8, 2, 4)


def test_tokens_go_to_their_experts_and_back_in_both_passes() -> None:
    """T k copies of H entries in 16 bit and a weight in fp32 each way; weights do not come back."""
    program = program_of(setup_of(SPREAD))
    copies = 256 * K
    exchanged = {c: n for c, n in met(program).items() if c.kind == "all_to_all"}
    assert exchanged == {
        Collective("all_to_all", 2 * copies * H, "ep", 8, "bf16"): 4 * L,
        Collective("all_to_all", 4 * copies, "ep", 8, "fp32"): 2 * L,
    }


def test_a_busy_rank_receives_more_than_it_sends() -> None:
    program = program_of(setup_of(SPREAD, "imbalance: 3"))
    sizes = {c.bytes for c in met(program) if c.kind == "all_to_all" and c.dtype == "bf16"}
    assert sizes == {3 * 2 * 256 * K * H}
    products = {k.work for k in program.kernels if isinstance(k.work, Gemm) and k.name.startswith("grouped")}
    assert {(work.batch, work.m) for work in products if not work.accumulate} == {(1, 3 * 256 * K)}


def test_gradients_of_experts_are_summed_over_their_replicas_only() -> None:
    """Two buffers, each split over those that hold the same parameters; padded to 64 elements and equal shares."""
    program = program_of(setup_of(SPREAD))
    experts = L * (E // 8) * 3 * H * F
    shared = parameter_count(setup_of(SPREAD).model) - L * E * 3 * H * F  # type: ignore[arg-type]
    reduced = {(c.group, c.size): c.bytes for c in met(program) if c.kind == "reduce_scatter"}
    assert reduced[("edp", 2)] == 4 * experts
    assert 4 * shared <= reduced[("dp", 16)] <= 4 * (shared + 64 * 64 + 16 * 128)
    owners = program.owners[program.mem_handle[program.mem_kind == 0]]
    sizes = sorted(program.mem_bytes[program.mem_kind == 0][owners == Owner.GRADIENT].tolist())
    assert sizes[-2:] == sorted(reduced.values())


def test_ranks_that_share_an_experts_matrices_gather_each_others_tokens() -> None:
    shared = met(program_of(setup_of(BESIDE_TENSOR.replace(", tensor: 1", ""))))
    apart = met(program_of(setup_of(BESIDE_TENSOR)))
    tokens = 256 // 2 * K
    assert shared[Collective("all_gather", 2 * 2 * tokens * H, "etp", 2, "bf16")] == L
    assert not any(c.group == "etp" for c in apart)
    assert apart[Collective("all_to_all", 2 * tokens * H, "ep", 8, "bf16")] == 4 * L


def test_one_rank_exchanges_nothing() -> None:
    text = text_of("{data: {degree: 16}}")
    assert not any(c.kind == "all_to_all" for c in met(program_of(load_text(text, "x").strategies[0])))


def test_latent_attention_keeps_whole_keys_and_values() -> None:
    """q and k of 64 + 32 entries per head, v and the result of 64, 8 heads, 256 tokens, 16 bit."""
    program = program_of(setup_of(SPREAD, preset="deepseek-tiny"))
    (forward,) = {k.work for k in program.kernels if isinstance(k.work, Attention) and not k.work.backward}
    assert (forward.head_dim, forward.value_head_dim, forward.heads, forward.kv_heads) == (96, 64, 8, 8)
    assert forward.flops == 2 * 8 * 256 * 256 * (96 + 64) // 2
    sizes = Counter(program.mem_bytes[program.mem_kind == 0].tolist())
    assert sizes[2 * 256 * 8 * 96] >= 2 * L and sizes[2 * 256 * 8 * 64] >= 2 * L


def test_the_first_layers_are_plain() -> None:
    program = program_of(setup_of(SPREAD, "dense_layers: 3"))
    assert sum(n for c, n in met(program).items() if c.kind == "all_to_all" and c.dtype == "bf16") == 4
    assert {path.split(".")[2] for path in program.paths if path.startswith("layers.0.")} >= {"mlp"}


def test_dropping_makes_a_step_shorter_and_imbalance_longer() -> None:
    def step_ns(experts: str) -> float:
        text = text_of(SPREAD, experts).replace("seq_len: 256", "seq_len: 8192")
        time = simulate_setup(load_text(text, "experts").strategies[0]).time
        assert time is not None
        return time.step_ns

    balanced, busy = step_ns("imbalance: 1"), step_ns("imbalance: 4")
    dropped = step_ns("imbalance: 4, capacity_factor: 1")
    assert dropped < busy and balanced < busy


# The border


@pytest.mark.parametrize(
    ("parallel", "experts", "path", "text"),
    [
        (SPREAD.replace("degree: 8", "degree: 3"), "count: 9", "parallel.expert.degree", "do not go evenly into 16"),
        (SPREAD, "count: 12", "parallel.expert.degree", "must divide model.experts.count (12)"),
        (SPREAD, "top_k: 9", "model.experts.top_k", "at most the number of experts (8)"),
        (SPREAD, "imbalance: 5", "model.experts.imbalance", "from 1 (balanced) to 4"),
        (SPREAD, "imbalance: 0.5", "model.experts.imbalance", "from 1 (balanced) to 4"),
        (SPREAD, "groups: 3", "model.experts.groups", "must divide the number of experts"),
        (SPREAD, "shared_gate: true", "model.experts.shared_gate", "there is no shared expert"),
        (SPREAD, "selection_bias: true", "model.experts.selection_bias", "goes with scores: sigmoid"),
        (SPREAD, "dense_layers: 5", "model.experts.dense_layers", "at most the number of layers (4)"),
        (BESIDE_TENSOR.replace("tensor: 1", "tensor: 4"), "top_k: 2", "parallel.expert.degree", "8 x 4 ranks"),
        (
            BESIDE_TENSOR.replace("sequence_parallel: true", "sequence_parallel: false"),
            "top_k: 2",
            "parallel.tensor.sequence_parallel",
            "sequence parallelism only",
        ),
        ("{fsdp: {degree: 16}, expert: {degree: 8}}", "top_k: 2", "parallel.expert", "not under fsdp"),
    ],
)
def test_what_does_not_fit_is_said(parallel: str, experts: str, path: str, text: str) -> None:
    found = problems(text_of(parallel, experts))
    assert [(p, text in t) for _, p, t in found] == [(path, True)], found


def test_a_model_without_experts_is_not_spread() -> None:
    found = problems(text_of(SPREAD, preset="llama-tiny").replace(", experts: {imbalance: 1}", ""))
    assert [path for _, path, _ in found] == ["parallel.expert"]


def test_experts_need_their_numbers_and_code_that_has_them() -> None:
    found = problems(text_of(SPREAD, "count: 8", "llama-tiny"))
    assert sorted(path for _, path, _ in found) == ["model.experts.ffn_hidden", "model.experts.top_k"]
    found = problems(text_of("{data: {degree: 16}}").replace("megatron", "torchtitan"))
    assert found[0][1] == "model.implementation"


def test_a_gpt_has_experts_in_megatrons_code_without_biases() -> None:
    experts = {"count": 8, "top_k": 2, "ffn_hidden": 64}
    config = config_of("gpt-tiny", {**preset_shapes("gpt-tiny"), "bias": False}, None, {"experts": experts})
    assert config.implementation == "megatron" and config.activation == "gelu"
    with pytest.raises(ModelError, match=r"experts have no biases here"):
        config_of("gpt-tiny", preset_shapes("gpt-tiny"), None, {"experts": experts})
    with pytest.raises(ModelError, match=r"no such code for experts"):
        config_of("gpt-tiny", {**preset_shapes("gpt-tiny"), "bias": False}, "nanogpt", {"experts": experts})


def test_sinkhorn_goes_without_other_balancing() -> None:
    experts = {"sinkhorn": True, "auxiliary_loss": True}
    with pytest.raises(ModelError, match=r"goes without auxiliary_loss"):
        config_of("mixtral-tiny", preset_shapes("mixtral-tiny"), "megatron", {"experts": experts})


def test_any_llama_can_be_given_experts() -> None:
    setup = setup_of(SPREAD, "count: 8, top_k: 2, ffn_hidden: 256", "llama-tiny")
    assert np.count_nonzero(program_of(setup).row_kind == Row.COLLECTIVE)


# transformers' code

PLAIN = """\
model: {preset: PRESET, implementation: transformers}
cluster: {gpu: h100, gpus_per_node: 1}
batch: {micro_batch: 1, seq_len: 256}
precision: {parameters: bf16, compute: bf16}
"""


def test_transformers_experts_run_in_bf16_without_autocast() -> None:
    found = problems(PLAIN.replace("PRESET", "mixtral-tiny").replace("parameters: bf16", "parameters: fp32"))
    assert [path for _, path, _ in found] == ["precision"]


def test_transformers_has_no_latent_attention_and_routes_by_softmax() -> None:
    found = problems(PLAIN.replace("PRESET", "deepseek-tiny"))
    assert found[0][1] == "model.implementation"
    found = problems(
        PLAIN.replace("PRESET", "mixtral-tiny").replace("transformers}", "transformers, experts: {groups: 2}}")
    )
    assert [path for _, path, _ in found] == ["model.experts.groups"]


def test_products_of_experts_take_as_many_flops_in_either_code() -> None:
    """Balanced experts on one GPU: the same products, forward and backward, grouped by transformers or by Megatron."""

    def flops(implementation: str) -> int:
        text = PLAIN.replace("PRESET", "mixtral-tiny").replace("transformers", implementation)
        program = program_of(load_text(text, "experts").strategies[0])
        rows = program.row_argument[program.row_kind == Row.LAUNCH].tolist()
        works = [program.kernels[row].work for row in rows if "grouped" in program.kernels[row].name]
        return sum(work.flops for work in works if isinstance(work, Gemm))

    assert flops("transformers") == flops("megatron") == 3 * 6 * L * 256 * K * H * F
