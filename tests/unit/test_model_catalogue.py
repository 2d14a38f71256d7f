import json

import pytest

from sim.model.catalogue import (
    ModelError,
    build_model,
    implementations_of,
    preset_names,
    preset_shapes,
)
from sim.model.config import ModelConfig
from sim.model.flops import parameter_count
from sim.model.huggingface import MODEL_TYPES, read_huggingface_config


def preset(name, implementation=None, **overrides):
    return build_model(name, preset_shapes(name), implementation, overrides)


def parameters(m: ModelConfig) -> int:
    """Trainable parameters by shape: embeddings, blocks, final norm, head unless tied."""
    attention = m.hidden * m.head_dim * (2 * m.heads + 2 * m.kv_heads)
    if m.family == "gpt":
        mlp = 2 * m.hidden * m.ffn_hidden
        biases = (4 * m.hidden + m.hidden + m.ffn_hidden) if m.bias else 0
        block = attention + mlp + biases + 4 * m.hidden
        outside = (m.vocab + m.max_positions) * m.hidden + 2 * m.hidden
    else:
        biases = m.head_dim * (m.heads + 2 * m.kv_heads) if m.qkv_bias else 0
        norms = 2 * m.hidden + (2 * m.head_dim if m.qk_norm else 0)
        block = attention + 3 * m.hidden * m.ffn_hidden + biases + norms
        outside = m.vocab * m.hidden + m.hidden
    return m.layers * block + outside + (0 if m.tied_embeddings else m.vocab * m.hidden)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-8b", 8_190_735_360),
        ("mistral-7b", 7_241_732_096),
        ("gpt2-small", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_shapes_add_up_to_the_published_number_of_parameters(name, published):
    assert parameters(preset(name)) == published


@pytest.mark.parametrize("name, billions", [("nemotron-4-15b", 15.6), ("nemotron-4-340b", 341.0), ("kimi-k2", 1026.4)])
def test_shapes_add_up_to_the_size_in_the_name(name, billions):
    assert round(parameter_count(preset(name)) / 1e9, 1) == billions


def test_a_window_and_squared_relu_are_megatrons_alone():
    plain = {"window": 128, "activation": "squared_relu"}
    for field, value in plain.items():
        assert preset("llama-tiny", "megatron", **{field: value}).implementation == "megatron"
        assert preset("llama-tiny", **{field: value}).implementation == "megatron"
        found = faults(lambda field=field, value=value: preset("llama-tiny", "torchtitan", **{field: value}))
        assert [fault[0] for fault in found] == ["implementation"]
    assert faults(lambda: preset("gpt-tiny", window=128)) == [("window", 128, "the gpt family has none", ())]


def test_what_has_no_gate_takes_no_field_of_one():
    found = faults(lambda: preset("nemotron-8b", swiglu_fusion=False))
    assert found == [("swiglu_fusion", False, "is of gated MLPs; squared_relu has no gate", ())]
    assert [fault[0] for fault in faults(lambda: preset("mixtral-tiny", activation="squared_relu"))] == ["experts"]


def test_full_attention_now_and_then_needs_a_window():
    assert [preset("gpt-oss-20b", layers=4).window_of(layer) for layer in range(4)] == [128, 0, 128, 0]
    assert [preset("gpt-oss-20b", full_attention_every=0).window_of(layer) for layer in range(2)] == [128, 128]
    for values in ({"full_attention_every": 2}, {"full_attention_every": 1, "window": 8}):
        found = faults(lambda values=values: preset("llama-tiny", "megatron", **values))
        assert [fault[0] for fault in found] == ["full_attention_every"]


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_builds_in_every_implementation_of_its_family(name):
    shapes = preset_shapes(name)
    for implementation in implementations_of(shapes["family"], shapes):
        config = preset(name, implementation)
        assert config.implementation == implementation
        assert config.heads % config.kv_heads == 0


def test_an_implementation_decides_what_is_not_said():
    titan = preset("llama-3.1-8b")
    assert (titan.implementation, titan.norm, titan.rope, titan.gqa) == ("torchtitan", "fused", "complex", "repeat")
    assert (titan.logits, titan.keep_logits, titan.activation) == ("loss_upcast", False, "silu")
    hf = preset("llama-3.1-8b", "transformers")
    assert (hf.norm, hf.rope, hf.gqa, hf.logits, hf.keep_logits) == ("manual", "half", "sdpa", "loss_upcast", True)
    nano = preset("gpt2-small")
    assert (nano.implementation, nano.norm, nano.rope, nano.activation) == (
        "nanogpt",
        "layer_norm",
        "none",
        "gelu_tanh",
    )
    assert (nano.bias, nano.tied_embeddings, nano.dropout, nano.logits) == (True, True, 0.0, "keep_dtype")
    gpt2 = preset("gpt2-small", "transformers")
    assert (gpt2.activation, gpt2.dropout) == ("gelu_new", 0.1)
    megatron = preset("gpt-3-175b", "megatron")
    assert (megatron.attention, megatron.dropout, megatron.activation) == ("unfused", 0.1, "gelu")


def test_any_choice_is_overridden_one_by_one():
    config = preset("llama-3.1-8b", norm="manual", layers=2)
    assert (config.norm, config.layers, config.rope) == ("manual", 2, "complex")


def test_head_dim_and_kv_heads_follow_unless_fixed():
    assert preset("llama-2-7b").kv_heads == 32
    assert preset("llama-2-7b", hidden=2048).head_dim == 64
    assert preset("qwen3-8b", hidden=2048).head_dim == 128


def faults(action):
    with pytest.raises(ModelError) as caught:
        action()
    return [(fault.field, fault.value, fault.message, fault.allowed) for fault in caught.value.faults]


def test_heads_that_do_not_divide_are_faults():
    assert faults(lambda: preset("llama-tiny", heads=7)) == [
        ("heads", 7, "must divide hidden (512), or give head_dim", ()),
        ("kv_heads", 2, "must divide heads (7)", ()),
    ]
    assert faults(lambda: preset("llama-tiny", kv_heads=3)) == [("kv_heads", 3, "must divide heads (8)", ())]
    assert faults(lambda: preset("llama-tiny", layers=0)) == [("layers", 0, "a count of at least 1 is expected", ())]


def test_an_implementation_of_the_other_family_is_a_fault():
    assert faults(lambda: preset("llama-tiny", "nanogpt")) == [
        ("implementation", "nanogpt", "no such code for the llama family;", ("torchtitan", "transformers", "megatron"))
    ]


def test_an_unknown_preset_is_a_fault_with_the_names():
    assert faults(lambda: preset_shapes("llama-9")) == [("preset", "llama-9", "", preset_names())]


LLAMA_31 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
}
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}


def written(folder, data):
    path = folder / "config.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_a_config_json_gives_the_shapes_of_the_preset(tmp_path):
    config = build_model("llama-3.1-8b", read_huggingface_config(written(tmp_path, LLAMA_31)).shapes)
    assert config == preset("llama-3.1-8b")
    gpt2 = build_model("gpt2-small", read_huggingface_config(written(tmp_path, GPT2)).shapes, "transformers")
    assert gpt2 == preset("gpt2-small", "transformers")


def test_qwen_types_bring_their_biases_and_norms(tmp_path):
    qwen2 = read_huggingface_config(written(tmp_path, LLAMA_31 | {"model_type": "qwen2"})).shapes
    assert (qwen2["qkv_bias"], "qk_norm" in qwen2) == (True, False)
    qwen3 = read_huggingface_config(written(tmp_path, LLAMA_31 | {"model_type": "qwen3"})).shapes
    assert (qwen3["qk_norm"], qwen3["head_dim"], "qkv_bias" in qwen3) == (True, 128, False)


def test_an_unknown_model_type_names_those_known(tmp_path):
    path = written(tmp_path, {"model_type": "mamba"})
    assert faults(lambda: read_huggingface_config(path)) == [
        ("config", str(path), "model_type mamba is not known;", MODEL_TYPES)
    ]


def test_a_missing_wrong_or_absent_config_json_is_a_fault(tmp_path):
    path = written(
        tmp_path, {key: value for key, value in LLAMA_31.items() if key != "vocab_size"} | {"hidden_size": "4k"}
    )
    assert faults(lambda: read_huggingface_config(path)) == [
        ("config", str(path), "hidden_size is '4k', a whole number is expected", ()),
        ("config", str(path), "vocab_size is missing", ()),
    ]
    assert faults(lambda: read_huggingface_config(tmp_path / "none.json"))[0][2] == "no such file or directory"
    assert faults(lambda: read_huggingface_config(tmp_path))[0][2] == "is a directory"
    assert faults(lambda: read_huggingface_config(written(tmp_path, "[1")))[0][2].startswith("not a JSON file")
    assert faults(lambda: read_huggingface_config(written(tmp_path, "[1]")))[0][2] == "model_type None is not known;"


def test_an_activation_that_is_not_modelled_is_a_fault(tmp_path):
    path = written(tmp_path, GPT2 | {"activation_function": "relu"})
    assert faults(lambda: read_huggingface_config(path)) == [
        ("config", str(path), "activation_function relu is not known;", ("gelu_new", "gelu", "gelu_pytorch_tanh"))
    ]


def test_all_faults_of_a_config_json_are_told_at_once(tmp_path):
    path = written(tmp_path, LLAMA_31 | {"hidden_act": "relu", "attention_bias": True, "vocab_size": None})
    assert [fault[2] for fault in faults(lambda: read_huggingface_config(path))] == [
        "vocab_size is missing",
        "hidden_act relu is not known;",
        "attention_bias: true is not modelled (it also biases the output)",
    ]


def test_a_key_that_is_given_twice_is_a_fault(tmp_path):
    path = written(tmp_path, json.dumps(LLAMA_31)[:-1] + ', "vocab_size": 7}')
    assert [fault[2] for fault in faults(lambda: read_huggingface_config(path))] == ["vocab_size is given twice"]


def test_layers_are_limited_wherever_they_come_from(tmp_path):
    shapes = read_huggingface_config(written(tmp_path, LLAMA_31 | {"num_hidden_layers": 100_000})).shapes
    assert faults(lambda: build_model("deep", shapes)) == [("layers", 100_000, "at most 10,000 is expected", ())]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, []),
        ({"sliding_window": 4096, "model_type": "mistral"}, ["attention is modelled over all 8192 tokens"]),
        ({"sliding_window": 8192, "model_type": "mistral"}, []),
        ({"sliding_window": 4096, "model_type": "qwen2"}, []),
        ({"sliding_window": 4096, "model_type": "qwen2", "use_sliding_window": True}, ["over all 8192 tokens"]),
        ({"mlp_bias": True}, ["mlp_bias: biases in the MLP are not modelled"]),
        ({"mlp_bias": False, "attention_dropout": 0.0}, []),
        ({"attention_dropout": 0.1}, ["attention_dropout 0.1: dropout inside attention is not modelled"]),
    ],
)
def test_keys_that_would_change_the_result_are_told(tmp_path, keys, said):
    config = read_huggingface_config(written(tmp_path, LLAMA_31 | keys))
    found = config.not_modelled(build_model("mine", config.shapes), 8192)
    assert [text.endswith(end) for text, end in zip(found, said, strict=True)] == [True] * len(said)


def test_dropouts_of_gpt2_that_differ_from_the_models_are_told(tmp_path):
    config = read_huggingface_config(written(tmp_path, GPT2 | {"resid_pdrop": 0.1, "attn_pdrop": 0.2}))
    found = config.not_modelled(build_model("gpt2", config.shapes, "transformers"), 512)
    assert found == ["attn_pdrop 0.2: model.dropout is 0.1"]
