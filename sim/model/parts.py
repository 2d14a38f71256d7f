"""Names of the parts of a layer that checkpointing may wrap, and where each implementation keeps them."""

from __future__ import annotations

from sim.model.config import ModelConfig

MEGATRON_PARTS = {
    "attention": ("self_attention",),
    "core_attention": ("self_attention.core_attention",),
    "mlp": ("mlp",),
    "norm": ("input_layernorm", "pre_mlp_layernorm"),
}
MEGATRON_EXPERTS = {"moe": ("moe",), "shared_experts": ("moe.shared_experts",)}
MEGATRON_CONSUMERS = {
    "norm": (("input_layernorm", "self_attention"), ("pre_mlp_layernorm", "mlp"), ("pre_mlp_layernorm", "moe")),
    "activation": (
        ("mlp.activation_func", "mlp.linear_fc2"),
        ("moe.experts.activation_func", "moe.experts.linear_fc2"),
    ),
}
PARTS: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    ("llama", "torchtitan"): {
        "attention": ("attention",),
        "mlp": ("feed_forward",),
        "norm": ("attention_norm", "ffn_norm"),
    },
    ("llama", "transformers"): {
        "attention": ("self_attn",),
        "mlp": ("mlp",),
        "norm": ("input_layernorm", "post_attention_layernorm"),
    },
    ("bert", "transformers"): {"attention": ("attention",)},
    ("vit", "transformers"): {
        "attention": ("attention",),
        "mlp": ("mlp",),
        "norm": ("layernorm_before", "layernorm_after"),
    },
    ("gpt", "transformers"): {"attention": ("attn",), "mlp": ("mlp",), "norm": ("ln_1", "ln_2")},
    ("gpt", "megatron"): MEGATRON_PARTS,
    ("bert", "megatron"): MEGATRON_PARTS,
    ("llama", "megatron"): MEGATRON_PARTS | MEGATRON_EXPERTS,
}
"""Dotted names of modules below a layer, where it has them. nanoGPT's block, as recorded, is one function: it has no parts."""


CONSUMERS: dict[tuple[str, str], dict[str, tuple[tuple[str, str], ...]]] = {
    ("llama", "torchtitan"): {"norm": (("attention_norm", "attention"), ("ffn_norm", "feed_forward"))},
    ("llama", "transformers"): {"norm": (("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp"))},
    ("gpt", "transformers"): {"norm": (("ln_1", "attn"), ("ln_2", "mlp"))},
    ("vit", "transformers"): {"norm": (("layernorm_before", "attention"), ("layernorm_after", "mlp"))},
    ("gpt", "megatron"): MEGATRON_CONSUMERS,
    ("bert", "megatron"): MEGATRON_CONSUMERS,
    ("llama", "megatron"): MEGATRON_CONSUMERS,
}
"""Parts whose output may be discarded after the module that reads it has run: (part, reader), dotted below a layer."""


def discardable_of(config: ModelConfig) -> dict[str, tuple[tuple[str, str], ...]]:
    """The parts of a layer whose output need not be kept, with their readers. A fused activation is no part."""
    known = CONSUMERS.get((config.family, config.implementation), {})
    return {name: parts for name, parts in known.items() if not (name == "activation" and config.bias_gelu_fusion)}


def parts_of(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The parts that can be checkpointed inside a layer of this model, by name."""
    experts, absent = config.experts, set[str]()
    if experts is None:
        absent = set(MEGATRON_EXPERTS)
    elif not experts.dense_layers and experts.every == 1:
        absent = {"mlp"}
    if experts is not None and not experts.shared_ffn_hidden:
        absent.add("shared_experts")
    known = PARTS.get((config.family, config.implementation), {})
    return {name: paths for name, paths in known.items() if name not in absent}
