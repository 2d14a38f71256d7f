"""Adapters and frozen weights in a scenario: what is trained, what is saved, what is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from sim.api import simulate_setup
from sim.model.adapters import is_trained
from sim.model.build import build_model
from sim.model.config import Fp8, ModelConfig
from sim.model.flops import model_flops_per_token, parameter_count
from sim.model.shard.tensor import TensorParallel
from sim.program.program import Mem, Owner, Program, Row
from sim.runtime.record import record
from sim.scenario import load_text
from sim.scenario.problems import ScenarioError
from sim.scenario.setup import Setup

TEXT = """
model: {preset: llama-tiny, implementation: IMPLEMENTATION, layers: 4, TRAINED}
cluster: {gpu: h100, gpus_per_node: 1}
batch: {micro_batch: 2, seq_len: 512}
precision: {parameters: bf16, compute: bf16}
"""


def setup_of(trained: str, more: str = "", implementation: str = "torchtitan") -> Setup:
    text = TEXT.replace("IMPLEMENTATION", implementation).replace(", TRAINED", f", {trained}" if trained else "")
    return load_text(text + more, "lora").strategies[0]


def config_of(trained: str, implementation: str = "torchtitan") -> ModelConfig:
    model = setup_of(trained, implementation=implementation).model
    assert isinstance(model, ModelConfig)
    return model


def trained(config: ModelConfig) -> int:
    """Parameters that get a gradient."""
    return sum(p.elements for name, p in build_model(config).named_parameters() if is_trained(config, name))


def test_adapters_of_llama_2_7b_are_as_many_as_litgpt_prints() -> None:
    """LitGPT's tables (tutorials/resource-tables.md): rank 8 on q and v of Llama 2 7B, 4,194,304 trainable."""
    text = "model: {preset: llama-2-7b, lora: {rank: 8}}\ncluster: {gpu: a100}\nbatch: {micro_batch: 1, seq_len: 64}\n"
    model = load_text(text, "litgpt").strategies[0].model
    assert isinstance(model, ModelConfig)
    assert trained(model) == 4_194_304


@pytest.mark.parametrize("implementation", ["torchtitan", "transformers"])
def test_only_adapters_are_trained(implementation: str) -> None:
    config = config_of("lora: {rank: 8, targets: [all, head]}", implementation)
    names = [name for name, _ in build_model(config).named_parameters() if is_trained(config, name)]
    assert len(names) == 2 * (7 * 4 + 1)
    assert all("lora_" in name for name in names)


def test_megatrons_adapter_is_split_by_columns_twice() -> None:
    """q, k and v of llama-tiny in one product, over 2 ranks: A [rank / 2, in], B [out / 2, rank]."""
    config = config_of("lora: {rank: 8, targets: [qkv]}", "megatron")
    model = build_model(config, TensorParallel(2))
    shapes = {name: slot.shape for name, slot in model.named_parameters() if is_trained(config, name)}
    width = (config.heads + 2 * config.kv_heads) * config.head_dim
    assert len(shapes) == 2 * config.layers
    assert shapes["layers.0.self_attention.linear_qkv.lora_a.weight"] == (4, config.hidden)
    assert shapes["layers.0.self_attention.linear_qkv.lora_b.weight"] == (width // 2, 8)


@pytest.mark.parametrize("eight_bit", [False, True])
def test_under_megatron_frozen_weights_have_no_product_of_their_own_and_keep_no_input(eight_bit: bool) -> None:
    more = "parallel: {data: {degree: 1, distributed_optimizer: true}}\n"
    adapted = setup_of("lora: {rank: 16, targets: [qkv]}", more, "megatron")
    whole = setup_of("", more, "megatron")
    if eight_bit:
        adapted, whole = in_8_bit(adapted), in_8_bit(whole)
    names = [launches(record(setup, steps=1)) for setup in (adapted, whole)]
    wgrad = "te_gemm_wgrad" if eight_bit else "wgrad_gemm_accum_fp32"
    assert names[1][wgrad] == (4 * 4 if eight_bit else 4 * 4 + 1)
    assert names[0]["wgrad_gemm_accum_fp32"] == 2 * 4  # the adapters'
    assert names[0]["te_gemm_wgrad"] == 0
    saved = [simulate_setup(setup).owners[Owner.ACTIVATION] for setup in (adapted, whole)]
    assert saved[0] < saved[1]


def test_megatrons_adapters_are_split_over_the_ranks() -> None:
    more = "parallel: {tensor: {degree: 2}}\n"
    with pytest.raises(ScenarioError, match=r"must divide model.lora.rank \(3\)"):
        two = TEXT.replace("gpus_per_node: 1", "gpus_per_node: 2").replace("IMPLEMENTATION", "megatron")
        load_text(two.replace("TRAINED", "lora: {rank: 3, targets: [qkv]}") + more, "lora")
    setup = load_text(two.replace("TRAINED", "lora: {rank: 4, targets: [qkv]}") + more, "lora").strategies[0]
    program = record(setup, steps=1)
    rows = program.row_argument[program.row_kind == Row.COLLECTIVE].tolist()
    gathered = [program.collectives[n].bytes for n in rows if program.collectives[n].kind == "all_gather"]
    assert gathered == [2 * 512 * 4 * 2] * 4  # of each layer [B, S, rank] in bf16


def in_8_bit(setup: Setup) -> Setup:
    assert isinstance(setup.model, ModelConfig)
    return replace(setup, model=replace(setup.model, fp8=Fp8(recipe="tensorwise")))


def launches(program: Program) -> Counter[str]:
    return Counter(program.kernels[n].name for n in program.row_argument[program.row_kind == Row.LAUNCH].tolist())


def test_what_needs_no_gradient_is_neither_reduced_nor_stepped() -> None:
    program = record(setup_of("lora: {rank: 8}"), steps=1)
    gradients = sum(owner == Owner.GRADIENT for owner in program.owners)
    assert gradients == 2 * 2 * 4
    moments = sum(owner == Owner.OPTIMIZER for owner in program.owners)
    assert moments == 3 * gradients  # two moments and a step


def active(trained: str, owner: Owner) -> int:
    return simulate_setup(setup_of(trained, "checkpoint: null\n")).owners.get(owner, 0)


def test_adapters_on_every_layer_do_not_shrink_activations() -> None:
    """peft#2196 reports activations that grow while gradients vanish. Here only the first layer's norms keep less."""
    full, lora = active("", Owner.ACTIVATION), active("lora: {rank: 8, targets: all}", Owner.ACTIVATION)
    assert 0.97 * full < lora < 1.03 * full


def test_inputs_of_frozen_products_are_not_saved() -> None:
    """Two adapters per layer: what only the other five products would read is not kept."""
    assert active("lora: {rank: 8}", Owner.ACTIVATION) < active("", Owner.ACTIVATION)


def test_a_frozen_weight_spares_a_third_of_its_flops() -> None:
    full, lora = config_of(""), config_of("lora: {rank: 8}")
    attention = 12 * full.layers * full.heads * full.head_dim * 512
    weights = parameter_count(full) - full.vocab * full.hidden
    adapters = trained(lora)
    assert model_flops_per_token(full, 512) == 6 * weights + attention
    assert model_flops_per_token(lora, 512) == 4 * weights + 6 * adapters + attention


def test_transformers_makes_the_embeddings_output_need_a_gradient_with_checkpointing() -> None:
    for implementation, more, expected in (
        ("transformers", "checkpoint: {}\n", True),
        ("transformers", "", False),
        ("torchtitan", "checkpoint: {}\n", False),
    ):
        model = setup_of("lora: {rank: 8}", more, implementation).model
        assert isinstance(model, ModelConfig) and model.input_gradients is expected


def test_peft_keeps_adapters_in_fp32_and_torchtune_as_the_parameters() -> None:
    assert [c.lora.dtype for c in map(config_of, ["lora: {rank: 8}"]) if c.lora] == ["bf16"]
    lora = config_of("lora: {rank: 8}", "transformers").lora
    assert lora is not None and lora.dtype == "fp32"


def test_a_four_bit_weight_costs_half_a_byte_and_its_scales() -> None:
    """4096 x 4096: a byte per two elements, and per 64 elements a scale of four bytes or of one (with four per 256)."""
    sizes = {}
    for double in ("false", "true"):
        trained = f"layers: 1, lora: {{rank: 8, base: nf4, double_quantization: {double}}}"
        text = TEXT.replace("layers: 4, TRAINED", trained).replace("llama-tiny", "llama-3.1-8b")
        program = record(load_text(text.replace("IMPLEMENTATION", "transformers"), "nf4").strategies[0], steps=1)
        allocations = zip(program.mem_kind, program.mem_handle.tolist(), program.mem_bytes.tolist())
        freed = set(program.mem_handle[program.mem_kind == Mem.FREE].tolist())
        kept = [size for kind, handle, size in allocations if kind == Mem.ALLOC and handle not in freed]
        sizes[double] = kept
    elements = 4096 * 4096
    for kept in sizes.values():
        assert kept.count(elements // 2) == 2  # q and o
    assert sizes["false"].count(elements // 64 * 4) == 2
    assert sizes["true"].count(elements // 64) == 2 and sizes["true"].count(elements // 64 // 256 * 4) == 2


def test_quantized_weights_are_counted_as_parameters() -> None:
    plain = config_of("lora: {rank: 8}", "transformers")
    quantized = config_of("lora: {rank: 8, base: nf4}", "transformers")
    assert parameter_count(plain) == parameter_count(quantized)
    assert model_flops_per_token(plain, 512) == model_flops_per_token(quantized, 512)


@pytest.mark.parametrize(
    ("trained", "more", "said"),
    [
        ("lora: {rank: 0}", "", "at least 1"),
        ("lora: {rank: 8, targets: [wq]}", "", "one of q, k, v, o, gate, up, down, head"),
        ("lora: {rank: 8, targets: []}", "", "at least one linear layer"),
        ("lora: {rank: 8}, frozen: [norm.weight]", "", "freezes everything but its adapters"),
        ("lora: {rank: 8, targets: head}, tied_embeddings: true", "", "the head is the embedding"),
        ("lora: {rank: 8}", "checkpoint: {reentrant: true}\n", "set model.input_gradients: true"),
        ("lora: {rank: 8, base: nf4}", "", "which implementation transformers uses"),
        ("lora: {rank: 8, double_quantization: true}", "", "is for scales of base: nf4"),
        ('frozen: ["*"]', "", "leaves nothing to train"),
    ],
)
def test_what_cannot_be_is_said(trained: str, more: str, said: str) -> None:
    with pytest.raises(ScenarioError) as error:
        setup_of(trained, more)
    assert said in str(error.value)


def test_adapters_of_another_dtype_under_fsdp_are_refused() -> None:
    more = "parallel: {fsdp: {degree: 8}}\n"
    with pytest.raises(ScenarioError, match="adapters need the parameters' dtype"):
        load_text(
            (TEXT + more).replace("IMPLEMENTATION", "transformers").replace("TRAINED", "lora: {rank: 8}")
            .replace("gpus_per_node: 1", "gpus_per_node: 8"), "lora",
        )  # fmt: skip


def test_four_bit_weights_among_fp32_parameters_are_refused_under_fsdp() -> None:
    text = TEXT.replace("parameters: bf16", "parameters: fp32").replace("gpus_per_node: 1", "gpus_per_node: 8")
    text = text.replace("IMPLEMENTATION", "transformers").replace("TRAINED", "lora: {rank: 8, base: nf4, dtype: fp32}")
    with pytest.raises(ScenarioError, match="four-bit weights are stored as 16-bit numbers"):
        load_text(text + "parallel: {fsdp: {degree: 8}}\n", "lora")


def test_models_without_adapters_say_so() -> None:
    text = "model: {preset: gpt-tiny, lora: {rank: 8}}\ncluster: {gpu: h100}\nbatch: {micro_batch: 1, seq_len: 64}\n"
    with pytest.raises(ScenarioError, match="adapters are written for Llama-like models"):
        load_text(text, "lora")


def test_a_pattern_that_matches_nothing_is_told() -> None:
    text = TEXT.replace("IMPLEMENTATION", "torchtitan").replace("TRAINED", 'frozen: ["embed.*"]')
    with pytest.raises(ScenarioError, match="no parameter has such a name"):
        load_text(text, "frozen")


@pytest.mark.parametrize(("layers", "fits"), [("layers.[01].*", False), ("layers.1.*", True), ("layers.[23].*", True)])
def test_a_first_stage_that_trains_nothing_is_refused(layers: str, fits: bool) -> None:
    text = TEXT.replace("IMPLEMENTATION", "torchtitan").replace("TRAINED", f'frozen: ["tok_embeddings.*", "{layers}"]')
    text = text.replace("seq_len: 512", "seq_len: 512, accumulation: 4").replace("gpus_per_node: 1", "gpus_per_node: 2")
    text += "parallel: {pipeline: {degree: 2}}\n"
    if fits:
        assert simulate_setup(load_text(text, "stages").strategies[0]).fits
        return
    with pytest.raises(ScenarioError, match="leaves the first stage"):
        load_text(text, "stages")
