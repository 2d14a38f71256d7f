"""Keys of a Hugging Face config.json of networks that are no causal decoders, and what of it is not modelled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sim.model.config import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One model type. `keys`: field and key; `optional`: fields that a file may lack, with transformers' defaults (None:
    the field's own); `dropouts`: keys that one probability stands for."""

    family: Family
    keys: Mapping[str, str]
    optional: Mapping[str, Any]
    activation: str
    activations: Mapping[str, str]
    dropouts: tuple[str, ...]
    default_dropout: float


FORMATS: dict[str, Format] = {
    "bert": Format(
        family="bert",
        keys={
            "layers": "num_hidden_layers",
            "hidden": "hidden_size",
            "ffn_hidden": "intermediate_size",
            "heads": "num_attention_heads",
            "vocab": "vocab_size",
            "max_positions": "max_position_embeddings",
            "token_types": "type_vocab_size",
            "tied_embeddings": "tie_word_embeddings",
        },
        optional={"token_types": 2, "tied_embeddings": True},
        activation="hidden_act",
        activations={"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"},
        dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob"),
        default_dropout=0.1,
    ),
    "t5": Format(
        family="t5",
        keys={
            "layers": "num_layers",
            "decoder_layers": "num_decoder_layers",
            "hidden": "d_model",
            "ffn_hidden": "d_ff",
            "heads": "num_heads",
            "head_dim": "d_kv",
            "vocab": "vocab_size",
            "relative_buckets": "relative_attention_num_buckets",
        },
        optional={"decoder_layers": None, "relative_buckets": 32},
        activation="feed_forward_proj",
        activations={"relu": "relu", "gated-gelu": "gated_gelu"},
        dropouts=("dropout_rate",),
        default_dropout=0.1,
    ),
    "vit": Format(
        family="vit",
        keys={
            "layers": "num_hidden_layers",
            "hidden": "hidden_size",
            "ffn_hidden": "intermediate_size",
            "heads": "num_attention_heads",
            "image_size": "image_size",
            "patch_size": "patch_size",
        },
        optional={},
        activation="hidden_act",
        activations={"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"},
        dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob"),
        default_dropout=0.0,
    ),
}
CLASSIFIERS = ("BertForSequenceClassification", "ViTForImageClassification")


def encoder_fields(found: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig from the shapes `found` in a file and the rest of its keys, `data`."""
    form = FORMATS[data["model_type"]]
    fields = {"family": form.family, **form.optional, **found}
    fields["dropout"] = float(data.get(form.dropouts[0], form.default_dropout))
    if form.family == "t5" and fields["decoder_layers"] is None:
        fields["decoder_layers"] = fields["layers"]
    if form.family == "vit":
        fields["qkv_bias"] = bool(data.get("qkv_bias", True))
    if any(name in CLASSIFIERS for name in data.get("architectures") or ()):
        labels = data.get("id2label")
        fields |= {"head": "classification", "classes": len(labels) if isinstance(labels, dict) and labels else 2}
    return fields


def not_modelled_of(data: Mapping[str, Any], dropout: float) -> list[str]:
    """What a file asks for beyond that."""
    form = FORMATS[data["model_type"]]
    said = []
    if data.get("num_channels", 3) != 3:
        said.append(f"num_channels {data['num_channels']}: images of three colours are modelled")
    if data.get("is_decoder"):
        said.append("is_decoder: a causal mask is not modelled for this family")
    for key in form.dropouts:
        if (asked := data.get(key, form.default_dropout)) != dropout:
            said.append(f"{key} {asked}: model.dropout is {dropout:g}")
    return said
