"""FLOPs per token as people count them for MFU."""

from __future__ import annotations

from sim.model.build import build_model
from sim.model.config import ModelConfig

MFU_FORMULA = (
    "6 * P + 12 * L * A * D * S FLOPs per token over the dense peak; P: parameters without the token embedding table "
    "(with it where the head is tied to it), attention not halved for causality"
)


def parameter_count(config: ModelConfig) -> int:
    """All parameters, a shared one once."""
    return sum(p.elements for p in build_model(config).parameters())


def model_flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Forward and backward of one token (MFU_FORMULA), without recomputation."""
    embedding = 0 if config.tied_embeddings else config.vocab * config.hidden
    weights = parameter_count(config) - embedding
    return 6 * weights + 12 * config.layers * config.heads * config.head_dim * seq_len
