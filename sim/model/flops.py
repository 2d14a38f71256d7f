"""FLOPs per token as people count them for MFU."""

from __future__ import annotations

from sim.model.adapters import is_trained
from sim.model.build import build_model
from sim.model.config import ModelConfig

MFU_FORMULA = (
    "6 * P + 12 * L * A * D * S FLOPs per token over the dense peak; P: parameters without the token embedding table "
    "(with it where the head is tied to it), 4 * P for frozen ones, attention not halved for causality"
)


def parameter_count(config: ModelConfig) -> int:
    """All parameters, a shared one once."""
    return sum(p.elements for p in build_model(config).parameters())


def trained_parameter_count(config: ModelConfig) -> int:
    """Parameters that get a gradient."""
    return sum(p.elements for name, p in build_model(config).named_parameters() if is_trained(config, name))


def model_flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Forward and backward of one token (MFU_FORMULA), without recomputation. A frozen weight has no gradient of its
    own, which spares a third."""
    per_token = 12 * config.layers * config.heads * config.head_dim * seq_len
    table = (config.vocab, config.hidden)
    skips = not config.tied_embeddings
    for name, parameter in build_model(config).named_parameters():
        if skips and parameter.shape == table:  # the embedding, which comes first
            skips = False
            continue
        per_token += (6 if is_trained(config, name) else 4) * parameter.elements
    return per_token
