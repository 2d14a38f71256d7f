"""FLOPs as people count them for MFU."""

from __future__ import annotations

from dataclasses import replace

from sim.model.adapters import is_trained
from sim.model.build import build_model
from sim.model.config import ModelConfig
from sim.model.encoder_flops import encoder_flops
from sim.model.encoders import ENCODERS

MFU_FORMULA = (
    "6 * P + 12 * L * A * D * S FLOPs per token over the dense peak; P: parameters without the token embedding table "
    "(with it where the head is tied to it) and without experts that a token does not pass, 4 * P for frozen ones; "
    "attention not halved for causality; S: no more than the window in layers that have one; D with latent attention: the "
    "mean of a key's and a value's width; "
    "with two stacks or a classifier: every weight for the tokens that it works on, 12 * A * D for every pair of tokens"
)


def parameter_count(config: ModelConfig) -> int:
    """All parameters, a shared one once; quantized ones count as what they were."""
    return sum(p.elements for p in build_model(_unquantized(config)).parameters())


def _unquantized(config: ModelConfig) -> ModelConfig:
    return config if config.lora is None else replace(config, lora=replace(config.lora, base=None))


def active_parameter_count(config: ModelConfig) -> int:
    """Parameters that work on a token: of the routed experts top_k only."""
    experts, count = config.experts, parameter_count(config)
    if experts is None:
        return count
    matrices = 3 if config.activation == "silu" else 2
    expert = matrices * config.hidden * experts.ffn_hidden
    layers = sum(config.has_experts(layer) for layer in range(config.layers))
    layers += config.mtp_layers * config.has_experts(config.layers - 1)
    return count - layers * (experts.count - experts.top_k) * expert


def model_flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Forward and backward of one token (MFU_FORMULA), without recomputation."""
    embedding = 0 if config.tied_embeddings else config.vocab * config.hidden
    weights = active_parameter_count(config) - embedding
    widths, latent = 2 * config.head_dim, config.latent
    if latent is not None:
        widths = config.head_dim + latent.rope_head_dim + latent.value_head_dim
    numbers = [*range(config.layers), *[config.layers - 1] * config.mtp_layers]
    keys = sum(min(seq_len, config.window_of(layer) or seq_len) for layer in numbers)
    weights += config.mtp_layers * config.vocab * config.hidden  # the head once more at each depth
    return 6 * weights - 2 * _frozen_weights(config) + 6 * config.heads * widths * keys


def model_flops_per_sequence(config: ModelConfig, seq_len: int, target_len: int = 0) -> int:
    """Forward and backward of one sequence of S tokens (MFU_FORMULA), without recomputation."""
    if config.family in ENCODERS:
        return encoder_flops(config, seq_len, target_len)
    return model_flops_per_token(config, seq_len) * seq_len


def _frozen_weights(config: ModelConfig) -> int:
    """Weights that work on a token and have no gradient of their own; the embedding table, which comes first, is none."""
    table, count = None if config.tied_embeddings else (config.vocab, config.hidden), 0
    passed, of = (1, 1) if config.experts is None else (config.experts.top_k, config.experts.count)
    for name, parameter in build_model(_unquantized(config)).named_parameters():
        if parameter.shape == table:
            table = None
        elif not is_trained(config, name):
            count += parameter.elements * passed // of if parameter.of_expert else parameter.elements
    return count
