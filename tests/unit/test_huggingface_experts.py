"""A config.json of a model with experts gives the shapes of the preset of that name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.model.catalogue import build_model, preset_shapes
from sim.model.config import ModelConfig
from sim.model.faults import ModelError
from sim.model.huggingface import read_huggingface_config

COMMON = {"hidden_act": "silu", "tie_word_embeddings": False}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "max_position_embeddings": 163840,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "moe_layer_freq": 1,
}  # fmt: skip
FILES: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768,
        "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "router_aux_loss_coef": 0.02,
    },
    "qwen1.5-moe-a2.7b": {
        "model_type": "qwen2_moe", "num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 5632,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 151936, "max_position_embeddings": 8192,
        "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 5632, "norm_topk_prob": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": True, "mlp_only_layers": [],
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 10944,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "max_position_embeddings": 163840,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "routed_scaling_factor": 1.0,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    },
    "deepseek-v3": DEEPSEEK_V3,
}  # fmt: skip


def read(folder: Path, keys: dict[str, Any]) -> ModelConfig:
    path = folder / "config.json"
    path.write_text(json.dumps(COMMON | keys))
    return build_model("m", read_huggingface_config(path).shapes, "megatron")


@pytest.mark.parametrize("preset", FILES)
def test_a_config_json_gives_the_preset(tmp_path: Path, preset: str) -> None:
    config = read(tmp_path, FILES[preset])
    assert config == build_model("m", preset_shapes(preset), "megatron")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_routed_experts": None}, "n_routed_experts is None, a whole number is expected"),
        ({"moe_layer_freq": 2}, "experts in some of the layers only"),
        ({"mlp_only_layers": [3]}, "plain layers are modelled at the front only"),
    ],
)
def test_what_is_missing_or_not_modelled_is_said(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said.replace("(", r"\(")):
        read(tmp_path, DEEPSEEK_V3 | change)
