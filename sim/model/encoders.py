"""What the families that are no causal decoders add to the catalogue: whose code, its defaults, its choices."""

from __future__ import annotations

from typing import Any

from sim.model.config import Family, Implementation

Fields = dict[str, Any]

ENCODERS: tuple[Family, ...] = ("bert", "vit", "t5")

DEFAULTS: dict[tuple[Family, Implementation], Fields] = {
    ("bert", "transformers"): {
        "norm": "layer_norm",
        "rope": "none",
        "bias": True,
        "tied_embeddings": True,
        "activation": "gelu",
        "dropout": 0.1,
        "token_types": 2,
        "logits": "keep_dtype",
        "keep_logits": True,
    },
    ("bert", "megatron"): {
        "norm": "layer_norm",
        "rope": "none",
        "bias": True,
        "tied_embeddings": True,
        "activation": "gelu",
        "dropout": 0.1,
        "token_types": 2,
        "head": "pretraining",
        "attention": "unfused",
        "bias_gelu_fusion": True,
        "bias_dropout_fusion": True,
        "persistent_norm": True,
        "logits": "loss_upcast",
    },
    ("t5", "transformers"): {
        "norm": "manual",
        "rope": "relative",
        "relative_buckets": 32,
        "max_positions": 512,
        "tied_embeddings": True,
        "activation": "relu",
        "dropout": 0.1,
        "logits": "keep_dtype",
        "keep_logits": True,
    },
    ("t5", "megatron"): {
        "norm": "layer_norm",
        "rope": "none",
        "bias": True,
        "tied_embeddings": True,
        "activation": "gelu",
        "dropout": 0.1,
        "max_positions": 512,
        "attention": "unfused",
        "bias_gelu_fusion": True,
        "bias_dropout_fusion": True,
        "persistent_norm": True,
        "logits": "loss_upcast",
    },
    ("vit", "transformers"): {
        "norm": "layer_norm",
        "rope": "none",
        "bias": True,
        "qkv_bias": True,
        "activation": "gelu",
        "head": "classification",
        "classes": 1000,
        "logits": "keep_dtype",
        "keep_logits": True,
    },
}
"""What each code does where the user says nothing, as in `catalogue.IMPLEMENTATIONS`."""

_COMMON: dict[str, tuple[Any, ...]] = {
    "qk_norm": (False,),
    "bias_gelu_fusion": (False,),
    "swiglu_fusion": (False,),
    "bias_dropout_fusion": (False,),
    "persistent_norm": (False,),
    "loss_fusion": ("none",),
    "logits": ("keep_dtype",),
    "loss_chunks": (1,),
    "liger": ((),),
    "fp8_swiglu_input": (False,),
    "mlp_tiles": (1,),
}
_LAYER_NORM: dict[str, tuple[Any, ...]] = {
    "norm": ("layer_norm",),
    "rope": ("none",),
    "bias": (True,),
    "activation": ("gelu", "gelu_tanh"),
    "attention": ("sdpa", "math", "unfused"),
}
CHOICES: dict[tuple[Family, Implementation], dict[str, tuple[Any, ...]]] = {
    ("bert", "transformers"): _COMMON
    | _LAYER_NORM
    | {"qkv_bias": (False,), "head": ("language_model", "classification")},
    ("bert", "megatron"): _COMMON
    | _LAYER_NORM
    | {"qkv_bias": (False,), "head": ("pretraining",), "logits": ("loss_upcast",)}
    | {"loss_fusion": ("none", "native", "te")}
    | dict.fromkeys(("bias_gelu_fusion", "bias_dropout_fusion", "persistent_norm"), (False, True)),
    ("t5", "transformers"): _COMMON
    | {
        "norm": ("manual",),
        "rope": ("relative",),
        "bias": (False,),
        "qkv_bias": (False,),
        "tied_embeddings": (True,),
        "activation": ("relu", "gated_gelu"),
        "attention": ("sdpa", "unfused"),
    },
    ("t5", "megatron"): _COMMON
    | _LAYER_NORM
    | {"qkv_bias": (False,), "relative_buckets": (0,), "tied_embeddings": (True,), "attention": ("unfused",)}
    | dict.fromkeys(("bias_gelu_fusion", "bias_dropout_fusion", "persistent_norm"), (False, True))
    | {"logits": ("loss_upcast",), "loss_fusion": ("none", "native", "te")},
    ("vit", "transformers"): _COMMON
    | _LAYER_NORM
    | {"head": ("classification",), "tied_embeddings": (False,), "vocab": (0,)},
}
"""What each code can do instead, as in `catalogue.CHOICES`."""

OWN_FIELDS: dict[str, tuple[Family, ...]] = {
    "head": ("bert", "vit"),
    "classes": ("bert", "vit"),
    "token_types": ("bert",),
    "decoder_layers": ("t5",),
    "relative_buckets": ("t5",),
    "image_size": ("vit",),
    "patch_size": ("vit",),
}
"""Fields that only some families have."""


def derived(values: Fields) -> Fields:
    """Fields that follow from others: an image's tokens are its patches and the class token."""
    image, patch = values.get("image_size"), values.get("patch_size")
    if values["family"] == "vit" and image and patch:
        return {"max_positions": (image // patch) ** 2 + 1}
    return {}


def check_own_fields(values: Fields) -> list[tuple[str, str]]:
    """(field, what is the matter): fields of other families, heads without classes, fewer key heads."""
    family: Family = values["family"]
    faults = []
    for field, families in OWN_FIELDS.items():
        if field in values and family not in families:
            faults.append((field, f"is of {' and '.join(families)} models; {family} has no such field"))
    if family not in ENCODERS:
        return faults
    faults += [
        (field, f"is not of {family} models") for field in ("experts", "latent") if values.get(field) is not None
    ]
    image, patch = values.get("image_size", 0), values.get("patch_size", 0)
    if family == "vit" and (not image or not patch or image % patch):
        faults.append(("patch_size", f"must divide image_size ({image})"))
    if values.get("kv_heads", values["heads"]) != values["heads"]:
        faults.append(("kv_heads", f"the {family} family has as many key heads as query heads ({values['heads']})"))
    classifies = values.get("head") == "classification"
    if classifies and values.get("classes", 0) < 1:
        faults.append(("classes", "head: classification needs a number of classes"))
    elif not classifies and values.get("classes", 0):
        faults.append(("classes", "are for head: classification"))
    return faults
