"""From a configuration to modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sim.model.adapters import add_adapters
from sim.model.config import ModelConfig
from sim.model.experts import ExpertParallel
from sim.model.gpt import Gpt
from sim.model.language_model import Embedding, LanguageModel
from sim.model.llama import TitanLlama
from sim.model.megatron_bert import MegatronBert
from sim.model.megatron_gpt import MegatronGpt
from sim.model.megatron_t5 import MegatronT5
from sim.model.shard.context import ContextParallel
from sim.model.shard.tensor import TensorParallel
from sim.model.transformers_bert import BertForMaskedLM, BertForSequenceClassification
from sim.model.transformers_gpt2 import Gpt2LMHeadModel
from sim.model.transformers_llama import LlamaForCausalLM
from sim.model.transformers_t5 import T5ForConditionalGeneration
from sim.model.transformers_vit import ViTForImageClassification


def build_model(
    config: ModelConfig, parallel: TensorParallel | None = None, expert_parallel: ExpertParallel | None = None,
    context: ContextParallel | None = None,
) -> LanguageModel:  # fmt: skip
    """The network of `config`, its parameters without tensors: whole, or one rank's part under tensor and expert
    parallelism.

    `context`: its attention is that of ranks that share sequences. Raises ValueError for a combination nobody wrote.
    """
    if config.implementation == "megatron":
        parts = parallel or TensorParallel(), expert_parallel or ExpertParallel(), context or ContextParallel()
        if config.family == "t5":
            return MegatronT5(config, *parts)
        megatron = (MegatronBert if config.family == "bert" else MegatronGpt)(config, *parts)
        add_adapters(megatron, config)
        return megatron
    if (config.family, config.implementation) == ("llama", "torchtitan") and config.lora is None:
        return _with_gradient(TitanLlama(config, parallel), config)
    if parallel is not None and parallel.degree > 1:
        raise ValueError(f"{config.implementation} is not written for tensor parallelism")
    shares = context is not None and context.degree > 1 and config.implementation != "torchtitan"
    if shares and (config.family, config.implementation) != ("llama", "transformers"):
        raise ValueError(f"{config.implementation} is not written for context parallelism")
    known: dict[tuple[str, str], Callable[[ModelConfig], LanguageModel]] = {
        ("llama", "torchtitan"): TitanLlama,
        ("llama", "transformers"): partial(LlamaForCausalLM, context=context),
        ("gpt", "nanogpt"): Gpt,
        ("gpt", "transformers"): Gpt2LMHeadModel,
        ("t5", "transformers"): T5ForConditionalGeneration,
        ("vit", "transformers"): ViTForImageClassification,
        ("bert", "transformers"): (
            BertForSequenceClassification if config.head == "classification" else BertForMaskedLM
        ),
    }
    built = known.get((config.family, config.implementation))
    if built is None:
        raise ValueError(f"no {config.implementation} implementation of {config.family}")
    model = built(config)
    add_adapters(model, config)
    return _with_gradient(model, config)


def _with_gradient(model: LanguageModel, config: ModelConfig) -> LanguageModel:
    """Its embedding's output is made to require a gradient where asked for."""
    embedding = next(child for _, child in model.children())
    if isinstance(embedding, Embedding):
        embedding.output_needs_gradient = config.input_gradients
    return model
