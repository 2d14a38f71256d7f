"""Shapes from a Hugging Face config.json, and what such a file asks for that is not modelled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.model.catalogue import Fields
from sim.model.config import ModelConfig
from sim.model.faults import Fault, ModelError
from sim.model.huggingface_encoders import FORMATS, encoder_fields, not_modelled_of
from sim.model.huggingface_experts import EXPERT_TYPES, experts_of_config

LLAMA_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "ffn_hidden": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
    "max_positions": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings",
}
GPT2_KEYS = {
    "layers": "n_layer",
    "hidden": "n_embd",
    "ffn_hidden": "n_inner",
    "heads": "n_head",
    "vocab": "vocab_size",
    "max_positions": "n_positions",
    "tied_embeddings": "tie_word_embeddings",
}
OPTIONAL_KEYS = ("kv_heads", "head_dim", "tied_embeddings", "ffn_hidden")
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", *FORMATS, *EXPERT_TYPES)
LLAMA_ACTIVATIONS = {"silu": "silu"}
GPT2_ACTIVATIONS = {"gelu_new": "gelu_new", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
GPT2_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
SWITCHES = {
    "mlp_bias": "biases in the MLP",
    "reorder_and_upcast_attn": "attention in fp32",
    "scale_attn_by_inverse_layer_idx": "scaling by the number of the layer",
    "add_cross_attention": "cross attention",
    "quantization_config": "quantization",
}
"""Keys that change what runs when they are set."""


@dataclass(frozen=True, slots=True)
class HuggingFaceConfig:
    """`shapes`: fields of ModelConfig; `keys`: the file as it is."""

    shapes: Fields
    keys: Mapping[str, Any]

    def not_modelled(self, model: ModelConfig, seq_len: int | None) -> list[str]:
        """What the file asks for that `model` does not do on sequences of `seq_len` tokens (None: not known)."""
        keys = self.keys
        said = [f"{key}: {what} are not modelled" for key, what in SWITCHES.items() if keys.get(key)]
        if keys["model_type"] in FORMATS:
            return said + not_modelled_of(keys, model.dropout)
        window = keys.get("sliding_window")
        slides = keys.get("use_sliding_window", keys["model_type"] == "mistral")
        if type(window) is int and slides and seq_len is not None and window < seq_len:
            said.append(f"sliding_window {window}: attention is modelled over all {seq_len} tokens")
        if keys.get("attention_dropout"):
            said.append(f"attention_dropout {keys['attention_dropout']}: dropout inside attention is not modelled")
        for key in GPT2_DROPOUTS:
            if keys.get(key, model.dropout) != model.dropout:
                said.append(f"{key} {keys[key]}: model.dropout is {model.dropout:g}")
        return said


def read_huggingface_config(path: Path) -> HuggingFaceConfig:
    """A config.json of a model type in MODEL_TYPES. Raises ModelError, all faults at once.

    transformers' defaults fill keys that a file may leave out: biases in q, k, v of Qwen2, RMSNorm on q and k of Qwen3,
    tied embeddings and 4 x hidden of GPT-2.
    """
    data, faults = _read(path)
    model_type = data.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ModelError([*faults, _fault(path, f"model_type {model_type} is not known;", MODEL_TYPES)])
    if model_type in FORMATS:
        return _read_encoder(path, data, faults)
    is_gpt2 = model_type == "gpt2"
    shapes, wrong = _read_keys(path, data, GPT2_KEYS if is_gpt2 else LLAMA_KEYS)
    faults += wrong
    key, known = ("activation_function", GPT2_ACTIVATIONS) if is_gpt2 else ("hidden_act", LLAMA_ACTIVATIONS)
    activation = str(data.get(key, next(iter(known))))
    if activation not in known:
        faults.append(_fault(path, f"{key} {activation} is not known;", tuple(known)))
    if data.get("attention_bias") is True and model_type != "qwen2":
        faults.append(_fault(path, "attention_bias: true is not modelled (it also biases the output)"))
    if model_type in EXPERT_TYPES:
        fields, missing = experts_of_config(data)
        shapes |= fields
        faults += [_fault(path, message) for message in missing]
    if faults:
        raise ModelError(faults)
    shapes["activation"] = known[activation]
    if is_gpt2:
        shapes.setdefault("ffn_hidden", 4 * shapes["hidden"])
        shapes.setdefault("tied_embeddings", True)
    elif model_type == "qwen2":
        shapes["qkv_bias"] = True
    elif model_type == "qwen3":
        shapes["qk_norm"] = True
        shapes.setdefault("head_dim", 128)
    return HuggingFaceConfig({"family": "gpt" if is_gpt2 else "llama", **shapes}, data)


def _read_encoder(path: Path, data: Mapping[str, Any], faults: list[Fault]) -> HuggingFaceConfig:
    form = FORMATS[data["model_type"]]
    shapes, wrong = _read_keys(path, data, form.keys, tuple(form.optional))
    faults += wrong
    activation = data.get(form.activation, next(iter(form.activations)))
    if activation not in form.activations:
        faults.append(_fault(path, f"{form.activation} {activation} is not known;", tuple(form.activations)))
    for key in form.dropouts:
        if type(data.get(key, 0.0)) not in (int, float):
            faults.append(_fault(path, f"{key} is {data[key]!r}, a number is expected"))
    if faults:
        raise ModelError(faults)
    return HuggingFaceConfig(encoder_fields(shapes, data) | {"activation": form.activations[activation]}, data)


def _fault(path: Path, message: str, allowed: tuple[str, ...] = ()) -> Fault:
    return Fault("config", str(path), message, allowed)


def _read(path: Path) -> tuple[dict[str, Any], list[Fault]]:
    """The file's keys, and those that it gives twice. Raises ModelError for a file that cannot be read."""
    twice: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice.extend(name for name in dict.fromkeys(names) if names.count(name) > 1)
        return dict(pairs)

    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
    except OSError as error:
        raise ModelError([_fault(path, (error.strerror or "cannot be read").lower())]) from None
    except (ValueError, RecursionError) as error:
        raise ModelError([_fault(path, f"not a JSON file: {error}")]) from None
    return data if isinstance(data, dict) else {}, [_fault(path, f"{name} is given twice") for name in twice]


def _read_keys(
    path: Path, data: Mapping[str, Any], keys: Mapping[str, str], optional: tuple[str, ...] = OPTIONAL_KEYS
) -> tuple[Fields, list[Fault]]:
    shapes, faults = {}, []
    for field, key in keys.items():
        value = data.get(key)
        if value is None:
            if field not in optional or (field == "ffn_hidden" and keys is LLAMA_KEYS):
                faults.append(_fault(path, f"{key} is missing"))
        elif type(value) is not (expected := bool if field == "tied_embeddings" else int):
            what = "true or false" if expected is bool else "a whole number"
            faults.append(_fault(path, f"{key} is {value!r}, {what} is expected"))
        else:
            shapes[field] = value
    return shapes, faults
