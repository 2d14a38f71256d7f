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


def preset(name, **overrides):
    return build_model(name, preset_shapes(name), None, overrides)


@pytest.mark.parametrize(
    ("name", "overrides", "published"),
    [
        ("bert-base", {}, 109_514_298),  # BertForMaskedLM
        ("bert-base", {"head": "classification", "classes": 2}, 109_483_778),  # 109,482,240 of BertModel and the head
        ("bert-large", {}, 335_174_458),
        ("bert-large", {"head": "classification", "classes": 2}, 335_143_938),
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
    assert (4, "parallel.pipeline", "models of the bert family are not cut into stages") in problems(text)


def test_an_encoder_has_learned_positions():
    text = BERT.replace("seq_len: 128", "seq_len: 1024")
    assert problems(text) == [(3, "batch.seq_len", "1024: the model has 512 learned positions (model.max_positions)")]


def test_the_head_is_a_field_of_the_scenario():
    model = only(BERT.replace("bert-base", "bert-base, head: classification, classes: 5")).model
    assert (model.head, model.classes) == ("classification", 5)
