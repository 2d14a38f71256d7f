"""What the families that are no causal decoders add to the catalogue: whose code, its defaults, its choices."""

from __future__ import annotations

from typing import Any

from sim.model.config import Family, Implementation

Fields = dict[str, Any]

ENCODERS: tuple[Family, ...] = ("bert",)

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
}
"""What each code does where the user says nothing, as in `catalogue.IMPLEMENTATIONS`."""

_COMMON: dict[str, tuple[Any, ...]] = {
    "qkv_bias": (False,),
    "qk_norm": (False,),
    "bias_gelu_fusion": (False,),
    "swiglu_fusion": (False,),
    "bias_dropout_fusion": (False,),
    "logits": ("keep_dtype",),
    "loss_chunks": (1,),
}
CHOICES: dict[tuple[Family, Implementation], dict[str, tuple[Any, ...]]] = {
    ("bert", "transformers"): _COMMON
    | {
        "norm": ("layer_norm",),
        "rope": ("none",),
        "bias": (True,),
        "activation": ("gelu", "gelu_tanh"),
        "attention": ("sdpa", "math", "unfused"),
    },
}
"""What each code can do instead, as in `catalogue.CHOICES`."""

OWN_FIELDS: dict[str, tuple[Family, ...]] = {
    "head": ("bert",),
    "classes": ("bert",),
    "token_types": ("bert",),
}
"""Fields that only some families have."""


def check_own_fields(values: Fields) -> list[tuple[str, str]]:
    """(field, what is the matter): fields of other families, heads without classes, fewer key heads."""
    family: Family = values["family"]
    faults = []
    for field, families in OWN_FIELDS.items():
        if field in values and family not in families:
            faults.append((field, f"is of {' and '.join(families)} models; {family} has no such field"))
    if family not in ENCODERS:
        return faults
    if values.get("kv_heads", values["heads"]) != values["heads"]:
        faults.append(("kv_heads", f"the {family} family has as many key heads as query heads ({values['heads']})"))
    classifies = values.get("head") == "classification"
    if classifies and values.get("classes", 0) < 1:
        faults.append(("classes", "head: classification needs a number of classes"))
    elif not classifies and values.get("classes", 0):
        faults.append(("classes", "are for head: classification"))
    return faults
