"""Experts and latent attention of a Hugging Face config.json: Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2 and -V3.

transformers' defaults fill what a file may leave out. No loss on balance: transformers adds one only on demand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Fields = dict[str, Any]
EXPERT_TYPES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
COUNTS: dict[str, dict[str, str]] = {
    "mixtral": {"count": "num_local_experts", "top_k": "num_experts_per_tok", "ffn_hidden": "intermediate_size"},
    "qwen2_moe": {"count": "num_experts", "top_k": "num_experts_per_tok", "ffn_hidden": "moe_intermediate_size"},
    "qwen3_moe": {"count": "num_experts", "top_k": "num_experts_per_tok", "ffn_hidden": "moe_intermediate_size"},
    "deepseek_v2": {"count": "n_routed_experts", "top_k": "num_experts_per_tok", "ffn_hidden": "moe_intermediate_size"},
    "deepseek_v3": {"count": "n_routed_experts", "top_k": "num_experts_per_tok", "ffn_hidden": "moe_intermediate_size"},
}
LATENT = {
    "kv_rank": ("kv_lora_rank", 512),
    "q_rank": ("q_lora_rank", 0),
    "rope_head_dim": ("qk_rope_head_dim", 64),
    "value_head_dim": ("v_head_dim", 128),
}


def experts_of_config(data: Mapping[str, Any]) -> tuple[Fields, list[str]]:
    """Fields of a model (experts, latent, head_dim, biases and norms of its type) and what is wrong, one line each."""
    model_type, wrong = data["model_type"], list[str]()
    experts: Fields = {}
    for field, key in COUNTS[model_type].items():
        if type(data.get(key)) is int:
            experts[field] = data[key]
        else:
            wrong.append(
                f"{key} is {data.get(key)!r}, a whole number is expected" if key in data else f"{key} is missing"
            )
    if data.get("decoder_sparse_step", 1) != 1 or data.get("moe_layer_freq", 1) != 1:
        wrong.append("experts in some of the layers only are modelled for a run of plain ones at the front")
    plain = data.get("mlp_only_layers") or []
    if plain != list(range(len(plain))):
        wrong.append(f"mlp_only_layers {plain}: plain layers are modelled at the front only")
    experts["dense_layers"] = len(plain)
    if wrong:
        return {}, wrong
    fields: Fields = {"experts": experts}
    if model_type == "mixtral":
        experts["weights_dtype"] = "fp32"
    elif model_type == "qwen2_moe":
        experts |= {"shared_ffn_hidden": data.get("shared_expert_intermediate_size", 5632), "shared_gate": True}
        experts["scores_first"] = not data.get("norm_topk_prob", False)
        fields["qkv_bias"] = data.get("qkv_bias", True)
    elif model_type == "qwen3_moe":
        experts["scores_first"] = not data.get("norm_topk_prob", False)
        fields["qk_norm"] = True
    elif model_type.startswith("deepseek"):
        _deepseek(data, experts, fields)
    return fields, []


def _deepseek(data: Mapping[str, Any], experts: Fields, fields: Fields) -> None:
    newer = data["model_type"] == "deepseek_v3"
    experts["shared_ffn_hidden"] = (data.get("n_shared_experts") or 0) * experts["ffn_hidden"]
    experts["dense_layers"] = data.get("first_k_dense_replace", 3 if newer else 0)
    if newer:
        experts |= {"scores": "sigmoid", "selection_bias": True}
    else:
        experts["scores_first"] = True
    groups = data.get("n_group") or 1
    if groups > 1 and (newer or data.get("topk_method") == "group_limited_greedy"):
        experts |= {"groups": groups, "groups_top": data.get("topk_group") or 1}
    scaling = data.get("routed_scaling_factor", 2.5 if newer else 1.0)
    if scaling != 1:
        experts["scaling"] = float(scaling)
    fields["latent"] = {field: data.get(key, default) or 0 for field, (key, default) in LATENT.items()}
    fields["head_dim"] = data.get("qk_nope_head_dim", 128)
