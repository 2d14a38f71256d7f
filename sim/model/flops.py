"""FLOPs per token as people count them for MFU."""

from __future__ import annotations

from sim.model.build import build_model
from sim.model.config import ModelConfig

MFU_FORMULA = (
    "6 * P + 12 * L * A * D * S FLOPs per token over the dense peak; P: parameters without the token embedding table "
    "(with it where the head is tied to it) and without experts that a token does not pass, attention not halved for "
    "causality; D with latent attention: the mean of a key's and a value's width"
)


def parameter_count(config: ModelConfig) -> int:
    """All parameters, a shared one once."""
    return sum(p.elements for p in build_model(config).parameters())


def active_parameter_count(config: ModelConfig) -> int:
    """Parameters that work on a token: of the routed experts top_k only."""
    experts, count = config.experts, parameter_count(config)
    if experts is None:
        return count
    expert = 3 * config.hidden * experts.ffn_hidden
    return count - (config.layers - experts.dense_layers) * (experts.count - experts.top_k) * expert


def model_flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Forward and backward of one token (MFU_FORMULA), without recomputation."""
    embedding = 0 if config.tied_embeddings else config.vocab * config.hidden
    weights = active_parameter_count(config) - embedding
    widths, latent = 2 * config.head_dim, config.latent
    if latent is not None:
        widths = config.head_dim + latent.rope_head_dim + latent.value_head_dim
    return 6 * weights + 6 * config.layers * config.heads * widths * seq_len
