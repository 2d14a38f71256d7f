"""From a configuration to modules."""

from __future__ import annotations

from sim.model.config import ModelConfig
from sim.model.gpt import Gpt
from sim.model.llama import TitanLlama
from sim.model.module import Module


def build_model(config: ModelConfig) -> Module:
    """The network of `config`, its parameters without tensors. Raises ValueError for a combination nobody wrote."""
    built = {
        ("llama", "torchtitan"): TitanLlama,
        ("gpt", "nanogpt"): Gpt,
    }.get((config.family, config.implementation))
    if built is None:
        raise ValueError(f"no {config.implementation} implementation of {config.family}")
    return built(config)
