"""FLOPs as people count them for MFU."""

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


def model_flops_per_sequence(config: ModelConfig, seq_len: int) -> int:
    """Forward and backward of one sequence of S tokens (MFU_FORMULA), without recomputation.

    What a classification head does to one token is counted once.
    """
    embedding = 0 if config.tied_embeddings and config.head == "language_model" else config.vocab * config.hidden
    once = 0
    if config.head == "classification":  # pooler and classifier
        once = (config.hidden + 1) * (config.hidden + config.classes)
    weights = parameter_count(config) - embedding - once
    scores = 12 * config.layers * config.heads * config.head_dim * seq_len
    return (6 * weights + scores) * seq_len + 6 * once
