"""Models by name, completed with what an implementation's code does.

Shapes come from `presets.yaml` or the user's config.json (`huggingface`); which tensors are saved depends on whose code runs
(`IMPLEMENTATIONS`); any field may then be overridden. The result is a checked `ModelConfig`.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from importlib.resources import files
from typing import Any

from ruamel.yaml import YAML

from sim.model import encoders
from sim.model.config import Family, Implementation, ModelConfig
from sim.model.expert_fields import check_nested, completed, merged, only_some, unwritten, written_by
from sim.model.faults import Fault, ModelError
from sim.model.layer_kinds import check_kinds

Fields = dict[str, Any]
"""Fields of ModelConfig by name, not yet complete."""

GPT_BLOCKS: Fields = {"norm": "layer_norm", "rope": "none", "bias": True, "tied_embeddings": True}

IMPLEMENTATIONS: dict[tuple[Family, Implementation], Fields] = {
    ("llama", "torchtitan"): {"norm": "fused", "rope": "complex", "gqa": "repeat", "logits": "loss_upcast"},
    ("llama", "transformers"): {
        "norm": "manual",
        "rope": "half",
        "gqa": "sdpa",
        "logits": "loss_upcast",
        "keep_logits": True,
    },
    ("llama", "megatron"): {"norm": "fused", "rope": "fused", "gqa": "sdpa", "logits": "loss_upcast"}
    | {"bias_dropout_fusion": True, "swiglu_fusion": True, "persistent_norm": True},
    ("gpt", "nanogpt"): GPT_BLOCKS | {"activation": "gelu_tanh", "logits": "keep_dtype"},
    ("gpt", "transformers"): GPT_BLOCKS
    | {"activation": "gelu_new", "dropout": 0.1, "logits": "loss_upcast", "keep_logits": True},
    ("gpt", "megatron"): GPT_BLOCKS
    | {
        "activation": "gelu",
        "dropout": 0.1,
        "attention": "unfused",
        "bias_gelu_fusion": True,
        "bias_dropout_fusion": True,
        "persistent_norm": True,
        "logits": "loss_upcast",
    },
    **encoders.DEFAULTS,
}
"""What each code does where the user says nothing. The first implementation of a family is its default."""


NO_FUSIONS: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("bias_gelu_fusion", "swiglu_fusion", "fp8_swiglu_input", "bias_dropout_fusion", "persistent_norm"), (False,)
) | {"loss_fusion": ("none",), "liger": ((),), "mlp_tiles": (1,), "mtp_layers": (0,)}
LOSS_FUSIONS: dict[str, tuple[Any, ...]] = {"loss_fusion": ("none", "native", "te")}
LLAMA_CODE: dict[str, tuple[Any, ...]] = {
    "bias": (False,),
    "dropout": (0.0,),
    "activation": ("silu",),
    "norm": ("manual", "fused"),
    "gqa": ("sdpa", "repeat"),
    "attention": ("sdpa", "math"),
    **NO_FUSIONS,
}
GPT_CODE: dict[str, tuple[Any, ...]] = {
    "qkv_bias": (False,),
    "qk_norm": (False,),
    "norm": ("layer_norm",),
    "rope": ("none",),
    "activation": ("gelu", "gelu_tanh"),
    "attention": ("sdpa", "math"),
    **NO_FUSIONS,
}
CHOICES: dict[tuple[Family, Implementation], dict[str, tuple[Any, ...]]] = {
    ("llama", "torchtitan"): LLAMA_CODE | {"rope": ("complex", "cos_sin")},
    ("llama", "transformers"): {name: known for name, known in LLAMA_CODE.items() if name not in ("liger", "mlp_tiles")}
    | {"rope": ("half",), "loss_chunks": (1,)},
    ("llama", "megatron"): LLAMA_CODE
    | {"norm": ("fused", "layer_norm"), "rope": ("fused",), "gqa": ("sdpa",), "attention": ("sdpa",)}
    | {"activation": ("silu", "squared_relu")}
    | LOSS_FUSIONS
    | {"logits": ("loss_upcast",), "loss_chunks": (1,), "mtp_layers": (0, 1, 2, 3)}
    | {"bias_dropout_fusion": (True,)}
    | dict.fromkeys(("swiglu_fusion", "fp8_swiglu_input", "persistent_norm"), (False, True)),
    ("gpt", "nanogpt"): GPT_CODE | {"logits": ("loss_upcast", "keep_dtype")},
    ("gpt", "transformers"): GPT_CODE
    | {"bias": (True,), "activation": ("gelu_new", "gelu", "gelu_tanh"), "loss_chunks": (1,)},
    ("gpt", "megatron"): GPT_CODE
    | {"attention": ("unfused", "sdpa", "math"), "logits": ("loss_upcast",), "loss_chunks": (1,)}
    | {"input_gradients": (False,)}
    | LOSS_FUSIONS
    | dict.fromkeys(("bias_gelu_fusion", "bias_dropout_fusion", "persistent_norm"), (False, True)),
    **encoders.CHOICES,
}
"""What each code can do instead; a field that is not named here takes any value."""


MOST, MOST_LAYERS = 10**9, 10_000
"""Limits that keep a slip of the keyboard from filling the memory."""


def preset_names() -> tuple[str, ...]:
    """Names accepted as `preset`."""
    return tuple(_presets())


def implementations_of(family: Family, shapes: Fields | None = None) -> tuple[Implementation, ...]:
    """Whose code can be imitated for a family, or for shapes of it; the first is the default."""
    known = tuple(implementation for known, implementation in IMPLEMENTATIONS if known == family)
    return written_by({**(shapes or {}), "family": family}, known)


def preset_shapes(name: str) -> Fields:
    """Published shapes of a preset. Raises ModelError."""
    try:
        return dict(_presets()[name])
    except KeyError:
        raise ModelError([Fault("preset", name, "", preset_names())]) from None


def build_model(
    name: str, shapes: Fields, implementation: str | None = None, overrides: Fields | None = None
) -> ModelConfig:
    """A complete ModelConfig: shapes, then the implementation's choices, then overrides. Raises ModelError.

    `shapes` holds at least family, layers, hidden, heads, vocab, max_positions and ffn_hidden. head_dim follows
    hidden / heads unless the shapes or the overrides fix it; kv_heads follows heads likewise.
    """
    family, given = shapes["family"], merged(shapes, overrides or {})
    known = implementations_of(family, given)
    faults = []
    if not known:
        raise ModelError(Fault(field, given[field], f"is not of {family} models") for field in unwritten(given))
    if implementation is not None and implementation not in known:
        of = f"the {family} family" if known == implementations_of(family) else " and ".join(only_some(given))
        faults = [Fault("implementation", implementation, f"no such code for {of};", known)]
    code = next((code for code in known if code == implementation), known[0])
    values = {**IMPLEMENTATIONS[family, code], **given}
    values.setdefault("kv_heads", values["heads"])
    values |= encoders.derived(values)
    faults += check_shapes(values) + check_choices(values, family, code) + check_kinds(given)
    faults += [Fault(field, values.get(field), message) for field, message in encoders.check_own_fields(values)]
    faults = faults or check_nested(values, family, code)
    if faults:
        raise ModelError(faults)
    values.setdefault("head_dim", values["hidden"] // values["heads"])
    return ModelConfig(**completed({**values, "name": name, "implementation": code}))


def check_shapes(values: Fields) -> list[Fault]:
    """What cannot be built: counts below 1 or absurd, heads that do not divide hidden, kv_heads that do not divide heads."""
    counts = ("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "head_dim", "vocab", "max_positions")
    faults = [
        Fault(field, values[field], "a count of at least 1 is expected")
        for field in counts
        if field in values and (type(values[field]) is not int or values[field] < 1)
    ]
    for field in counts:
        most = MOST_LAYERS if field == "layers" else MOST
        if not faults and values.get(field, 1) > most:
            faults.append(Fault(field, values[field], f"at most {most:,} is expected"))
    if faults:
        return faults
    hidden, heads, kv_heads = values["hidden"], values["heads"], values["kv_heads"]
    head_dim = values.get("head_dim", hidden // heads)
    if "head_dim" not in values and hidden % heads:
        faults.append(Fault("heads", heads, f"must divide hidden ({hidden}), or give head_dim"))
    elif values.get("rope", "complex") != "none" and head_dim % 2:
        faults.append(Fault("head_dim", head_dim, "must be even: rotary positions turn pairs"))
    if heads % kv_heads:
        faults.append(Fault("kv_heads", kv_heads, f"must divide heads ({heads})"))
    if not 0 <= values.get("dropout", 0.0) < 1:
        faults.append(Fault("dropout", values["dropout"], "a probability from 0 to below 1 is expected"))
    return faults


def check_choices(values: Fields, family: Family, code: Implementation) -> list[Fault]:
    """Choices that the imitated code does not have."""
    return [
        Fault(field, values[field], f"not in {code}'s {family};", tuple(map(_written, allowed)))
        for field, allowed in CHOICES[family, code].items()
        if field in values and values[field] not in allowed
    ]


def _written(value: object) -> str:
    """As a scenario has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def overridable_fields() -> tuple[str, ...]:
    """Fields of ModelConfig that a scenario may set one by one."""
    fixed = ("name", "family", "implementation", "lora", "fp8", "first_layer")  # the last two hang on the whole set-up
    return tuple(field.name for field in fields(ModelConfig) if field.name not in fixed)


@cache
def _presets() -> dict[str, Fields]:
    text = files("sim.model").joinpath("presets.yaml").read_text(encoding="utf-8")
    presets: dict[str, Fields] = YAML(typ="safe", pure=True).load(text)
    return presets
