"""Networks that are no causal decoders: shapes, choices, config.json, FLOPs, and what the border refuses."""

import json

import pytest

from sim.model.catalogue import ModelError, build_model, preset_shapes
from sim.model.flops import model_flops_per_sequence, parameter_count
from sim.model.huggingface import read_huggingface_config
from tests.unit.scenario_texts import only, problems

BERT = """\
model:   {preset: bert-base}
cluster: {gpu: a100, gpus_per_node: 1}
batch:   {micro_batch: 2, seq_len: 128}
"""
CONFIG = {
    "model_type": "bert",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}


def preset_of(name, implementation, **overrides):
    return build_model(name, preset_shapes(name), implementation, overrides)


def preset(name, **overrides):
    return preset_of(name, None, **overrides)


@pytest.mark.parametrize(
    ("name", "overrides", "published"),
    [
        ("bert-base", {}, 109_514_298),  # BertForMaskedLM
        ("bert-base", {"head": "classification", "classes": 2}, 109_483_778),  # 109,482,240 of BertModel and the head
        ("bert-large", {}, 335_174_458),
        ("bert-large", {"head": "classification", "classes": 2}, 335_143_938),
        ("t5-small", {}, 60_506_624),
        ("t5-base", {}, 222_903_552),
        ("t5-large", {}, 737_668_096),
        ("t5-3b", {}, 2_851_598_336),
        ("t5-11b", {}, 11_307_321_344),
        ("vit-base-16", {}, 86_567_656),
        ("vit-large-16", {}, 304_326_632),
        ("vit-huge-14", {}, 632_045_800),
    ],
)
def test_parameters_are_those_of_transformers(name, overrides, published):
    assert parameter_count(preset(name, **overrides)) == published


def test_bert_base_without_a_head_has_the_published_number():
    classifier = 768 * 2 + 2
    assert parameter_count(preset("bert-base", head="classification", classes=2)) - classifier == 109_482_240


def test_flops_of_an_encoder_count_its_head_and_all_pairs():
    model = preset("bert-base")
    h, v, s = 768, 30522, 512
    layer = 4 * h * h + 4 * h + 8 * h * h + 4 * h + h + 4 * h
    outside = v * h + (512 + 2) * h + 2 * h + h * h + h + 2 * h + v
    assert model_flops_per_sequence(model, s) == (6 * (12 * layer + outside) + 12 * 12 * h * s) * s


def test_a_classifier_counts_once_per_sequence():
    model = preset("bert-base", head="classification", classes=2)
    h, s = 768, 128
    layer = 12 * h * h + 13 * h
    once = (h + 1) * (h + 2)
    assert model_flops_per_sequence(model, s) == (6 * (12 * layer + 514 * h + 2 * h) + 12 * 12 * h * s) * s + 6 * once


def faults(**overrides):
    with pytest.raises(ModelError) as caught:
        preset("bert-base", **overrides)
    return [(fault.field, fault.message) for fault in caught.value.faults]


def test_what_bert_does_not_have_is_a_fault():
    assert faults(kv_heads=4) == [("kv_heads", "the bert family has as many key heads as query heads (12)")]
    assert faults(head="classification") == [("classes", "head: classification needs a number of classes")]
    assert faults(classes=2) == [("classes", "are for head: classification")]
    assert faults(rope="half")[0][0] == "rope"
    assert faults(loss_chunks=2)[0][0] == "loss_chunks"


def test_what_vit_and_t5_do_not_have_is_a_fault():
    def of(name, **overrides):
        with pytest.raises(ModelError) as caught:
            preset(name, **overrides)
        return [fault.field for fault in caught.value.faults]

    assert of("vit-base-16", patch_size=15) == ["patch_size"]
    assert of("vit-base-16", head="language_model")[0] == "head"
    assert of("vit-base-16", vocab=100) == ["vocab"]
    assert of("t5-base", attention="math") == ["attention"]
    assert of("t5-base", tied_embeddings=False) == ["tied_embeddings"]
    assert of("t5-base", image_size=224) == ["image_size"]


def test_a_decoder_has_no_head_for_classes():
    with pytest.raises(ModelError) as caught:
        preset("llama-tiny", token_types=2)
    assert [(f.field, f.message) for f in caught.value.faults] == [
        ("token_types", "is of bert models; llama has no such field")
    ]


def test_a_config_json_gives_the_preset(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    assert build_model("bert-base", read_huggingface_config(path).shapes) == preset("bert-base")


def test_a_config_json_tells_its_head(tmp_path):
    path = tmp_path / "config.json"
    named = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}}
    path.write_text(json.dumps(CONFIG | named))
    shapes = read_huggingface_config(path).shapes
    assert (shapes["head"], shapes["classes"]) == ("classification", 3)


def test_faults_of_a_config_json_are_told_at_once(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"hidden_act": "relu", "hidden_dropout_prob": "much", "vocab_size": None}))
    with pytest.raises(ModelError) as caught:
        read_huggingface_config(path)
    assert [fault.message for fault in caught.value.faults] == [
        "vocab_size is missing",
        "hidden_act relu is not known;",
        "hidden_dropout_prob is 'much', a number is expected",
    ]


def test_a_decoder_in_the_config_is_warned_of(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"is_decoder": True, "attention_probs_dropout_prob": 0.0}))
    read = read_huggingface_config(path)
    said = read.not_modelled(build_model("bert", read.shapes), 128)
    assert said == [
        "is_decoder: a causal mask is not modelled for this family",
        "attention_probs_dropout_prob 0.0: model.dropout is 0.1",
    ]


def test_an_encoder_is_not_cut_into_stages():
    text = BERT.replace("gpus_per_node: 1", "gpus_per_node: 2") + "parallel: {pipeline: {degree: 2}}\n"
    assert (4, "parallel.pipeline", "transformers's models of the bert family are not cut into stages") in problems(
        text
    )


def test_an_encoder_has_learned_positions():
    text = BERT.replace("seq_len: 128", "seq_len: 1024")
    assert problems(text) == [(3, "batch.seq_len", "1024: the model has 512 learned positions (model.max_positions)")]


def test_the_head_is_a_field_of_the_scenario():
    model = only(BERT.replace("bert-base", "bert-base, head: classification, classes: 5")).model
    assert (model.head, model.classes) == ("classification", 5)


def test_flops_of_an_image_count_its_classifier_once():
    model = preset("vit-base-16")
    h, s = 768, 197
    layer = 12 * h * h + 13 * h
    patches = 3 * 16 * 16 * h + h
    trained = 12 * layer + patches + h + s * h + 2 * h
    assert model_flops_per_sequence(model, s) == (6 * trained + 12 * 12 * h * s) * s + 6 * 1001 * h - 6 * h + 6 * 1000


def test_flops_of_an_encoder_decoder_count_each_weight_for_its_tokens():
    model = preset("t5-base")
    h, f, v, s, t = 768, 3072, 32128, 512, 114
    encoder = 12 * (4 * h * h + 2 * h * f + 2 * h) + 32 * 12 + h
    cross_kv = 12 * 2 * h * h
    decoder = 12 * (8 * h * h + 2 * h * f + 3 * h) + 32 * 12 + h - cross_kv
    weights = 6 * ((encoder + cross_kv) * s + (decoder + v * h) * t)
    assert model_flops_per_sequence(model, s, t) == weights + 12 * 12 * h * (s * s + t * t + t * s)


VIT = """\
model:   {preset: vit-base-16}
cluster: {gpu: a100, gpus_per_node: 1}
batch:   {micro_batch: 2}
"""
T5 = """\
model:   {preset: t5-base}
cluster: {gpu: a100, gpus_per_node: 1}
batch:   {micro_batch: 2, seq_len: 512, target_len: 128}
"""


def test_an_image_has_the_tokens_of_its_patches():
    assert only(VIT).batch.seq_len == 197
    assert only(VIT.replace("vit-base-16", "vit-base-16, image_size: 384")).batch.seq_len == 577
    said = problems(VIT.replace("micro_batch: 2", "micro_batch: 2, seq_len: 128"))
    assert said == [(3, "batch.seq_len", "128: follows from image_size and patch_size (197 tokens): leave it out")]


def test_targets_are_for_models_with_two_stacks():
    batch = only(T5).batch
    assert (batch.seq_len, batch.target_len, batch.tokens_per_sequence) == (512, 128, 640)
    missing = problems(T5.replace(", target_len: 128", ""))
    assert missing == [(3, "batch.target_len", "is missing: the decoder's tokens per sequence")]
    said = problems(BERT.replace("seq_len: 128", "seq_len: 128, target_len: 8"))
    assert said == [(3, "batch.target_len", "8: is for models with a decoder beside their encoder (T5)")]
    assert problems(BERT.replace(", seq_len: 128", "")) == [(3, "batch.seq_len", "is missing")]


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ("checkpoint: {segment: 2}", "checkpoint.segment"),
        ("checkpoint: {reentrant: true}", "checkpoint.reentrant"),
        ("checkpoint: {nested: [2, 2]}", "checkpoint.nested"),
        ("checkpoint: {first: 3}", "checkpoint.first"),
        ("offload: {what: activations}", "offload"),
        ("parallel: {pipeline: {degree: 1}}", "parallel.pipeline"),
        ("precision: {compute: fp16}", "precision.compute"),
    ],
)
def test_what_is_not_modelled_with_two_stacks_is_refused(section, path):
    assert path in [found for _, found, _ in problems(f"{T5}{section}\n")]


def test_t5_and_vit_come_from_config_json(tmp_path):
    path = tmp_path / "config.json"
    t5 = {"model_type": "t5", "d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12}
    path.write_text(json.dumps(t5 | {"vocab_size": 32128, "feed_forward_proj": "gated-gelu"}))
    model = build_model("flan-t5-base", read_huggingface_config(path).shapes)
    assert (model.decoder_layers, model.activation, model.relative_buckets) == (12, "gated_gelu", 32)
    assert parameter_count(model) == 247_577_856 - 32128 * 768  # its own head is tied by transformers 5
    vit = {"model_type": "vit", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    vit |= {"intermediate_size": 3072, "image_size": 224, "patch_size": 16, "id2label": {str(n): "" for n in range(10)}}
    path.write_text(json.dumps(vit | {"architectures": ["ViTForImageClassification"]}))
    model = build_model("vit", read_huggingface_config(path).shapes)
    assert (model.classes, model.max_positions, model.dropout) == (10, 197, 0.0)


@pytest.mark.parametrize("form", ["discard: norm", "inside: attention, reentrant: true", "layers: [{discard: norm}]"])
def test_weights_beside_a_result_are_refused(form):
    eager = VIT.replace("vit-base-16", "vit-base-16, attention: unfused")
    (problem,) = problems(f"{eager}checkpoint: {{{form}}}\n")
    assert (problem[1], problem[2].partition(":")[0]) == ("checkpoint", "attention")
    assert only(f"{VIT}checkpoint: {{{form}}}\n").checkpoint is not None


@pytest.mark.parametrize("text", [BERT, VIT, T5])
def test_experts_are_not_of_these_families(text):
    changed = text.replace("preset:", "experts: {count: 8, top_k: 2}, preset:")
    assert [path for _, path, _ in problems(changed)] == ["model.experts"]


MEGATRON = """\
model:     {preset: bert-large, implementation: megatron, vocab: 30592}
cluster:   {gpu: a100, gpus_per_node: 8}
batch:     {micro_batch: 4, seq_len: 512}
precision: {parameters: bf16, compute: bf16}
parallel:  {tensor: {degree: 2}, data: {degree: 4}}
"""


def test_megatrons_bert_has_the_heads_of_both_tasks():
    model = only(MEGATRON).model
    h = 1024
    layer = 12 * h * h + 13 * h
    heads = 2 * (h * h + h) + 2 * h + 30592 + 2 * h + 2
    assert (model.head, model.token_types) == ("pretraining", 2)
    assert parameter_count(model) == 24 * layer + (30592 + 512 + 2) * h + 2 * h + heads


def test_megatrons_bert_splits_no_tokens():
    text = MEGATRON.replace("tensor: {degree: 2}", "tensor: {degree: 2, sequence_parallel: true}")
    assert [path for _, path, _ in problems(text)] == ["parallel.tensor.sequence_parallel"]
    assert [path for _, path, _ in problems(MEGATRON.replace("vocab", "head: language_model, vocab"))] == ["model.head"]


def test_megatrons_t5_has_learned_positions_and_biases():
    model = preset_of("t5-base", "megatron", vocab=30720)
    h, f = 768, 3072
    encoder = 4 * h * h + 4 * h + 2 * h * f + f + h + 4 * h
    decoder = encoder + 4 * h * h + 4 * h + 2 * h
    assert (model.norm, model.rope, model.activation, model.relative_buckets) == ("layer_norm", "none", "gelu", 0)
    assert parameter_count(model) == 12 * (encoder + decoder) + (30720 + 512) * h + 4 * h + 30720


def test_megatrons_t5_is_refused_in_stages_and_parts():
    text = T5.replace("t5-base", "t5-base, implementation: megatron") + "precision: {parameters: bf16}\n"
    assert only(text).model.implementation == "megatron"
    staged = text.replace("gpus_per_node: 1", "gpus_per_node: 2") + "parallel: {pipeline: {degree: 2}}\n"
    assert "parallel.pipeline" in [path for _, path, _ in problems(staged)]
    assert "checkpoint.inside" in [path for _, path, _ in problems(f"{text}checkpoint: {{inside: core_attention}}\n")]
