"""FLOPs of networks that are no causal decoders: every weight counts for the tokens that it works on.

As for decoders 6 FLOPs per weight and token (4 where the weight is frozen), and 12 A D per pair of tokens that
attention brings together; no pair is left out, the decoder's causal mask is not halved either.
"""

from __future__ import annotations

from math import prod

from sim.model.adapters import is_trained
from sim.model.build import build_model
from sim.model.config import ModelConfig


def encoder_flops(config: ModelConfig, seq_len: int, target_len: int) -> int:
    """Forward and backward of one sequence (and its target), without recomputation."""
    flops = 0
    for name, parameter in build_model(config).named_parameters():
        tokens = _tokens(config, name, seq_len, target_len)
        flops += (6 if is_trained(config, name) else 4) * prod(parameter.shape) * tokens
    pairs = config.layers * seq_len**2 + config.decoder_layers * (target_len**2 + target_len * seq_len)
    return flops + 12 * config.heads * config.head_dim * pairs


def _tokens(config: ModelConfig, name: str, seq_len: int, target_len: int) -> int:
    """Tokens that a weight works on: a table that is only looked up on none, a classifier on one; keys and values of
    attention across stacks on the source."""
    if name.startswith(("classifier.", "pooler.", "binary_head.")):
        return 1
    if config.decoder_layers and name.endswith("word_embeddings.weight"):
        return target_len
    if name.endswith("word_embeddings.weight"):
        return seq_len if config.tied_embeddings and config.head != "classification" else 0
    if any(part in name for part in (".EncDecAttention.k.", ".EncDecAttention.v.", ".cross_attention.linear_kv.")):
        return seq_len
    if name.startswith("decoder"):
        return target_len
    return target_len if name.startswith(("shared.", "lm_head.")) else seq_len
