"""FLOPs of networks that are no causal decoders: every matrix counts for the tokens that it works on.

As for decoders 6 FLOPs per parameter and token, and 12 A D per pair of tokens that attention brings together; none is
masked here.
"""

from __future__ import annotations

from sim.model.config import ModelConfig


def encoder_flops(config: ModelConfig, parameters: int, seq_len: int) -> int:
    """Forward and backward of one sequence, without recomputation; `parameters`: all of the network's.

    A classification head works on one token of the sequence.
    """
    width = config.heads * config.head_dim
    scores = 12 * config.layers * width * seq_len * seq_len
    once = 0
    if config.head == "classification":
        once = (config.hidden + 1) * (config.hidden + config.classes)  # pooler and classifier
    tied = config.tied_embeddings and config.head == "language_model"
    embedding = 0 if tied else config.vocab * config.hidden
    return 6 * (parameters - embedding - once) * seq_len + scores + 6 * once
