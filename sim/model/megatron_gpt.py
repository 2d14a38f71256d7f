"""Megatron's GPTModel, one rank of t: GPT, and Llama-like models by the same code. V vocab, the rest as in megatron_layer.

GPT without Transformer Engine: a layer saves (10 + 24/t) sbh + 5/t a s^2 b bytes, or 1/t of it all with sequence
parallelism, and 16 sb (16/t sb) of statistics (Korthikanti et al. 2022, with fp32 statistics).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from sim.model import functional as F
from sim.model import routing as R
from sim.model.calls import Tensor, active
from sim.model.config import ModelConfig
from sim.model.experts import ExpertParallel
from sim.model.language_model import Embedding, LanguageModel
from sim.model.megatron_latent import LatentSelfAttention
from sim.model.megatron_layer import SelfAttention, TransformerLayer, make_norm
from sim.model.megatron_moe import MoeLayer
from sim.model.megatron_mtp import MultiTokenPrediction, PredictionLayer
from sim.model.module import Module, ModuleList
from sim.model.shard.context import ContextParallel
from sim.model.shard.tensor import ColumnParallelLinear, TensorParallel, VocabParallelEmbedding


class LanguageModelEmbedding(Module):
    """Word and position embeddings [B, S, H], added, transposed by a copy to [S, B, H], dropped out.

    With sequence parallelism each rank copies its S/t tokens out of the whole; without learned positions to add, the
    sum over the ranks is scattered instead (reduce_scatter_embeddings).
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        self.config = config
        self.parallel = parallel
        learned = config.rope == "none"
        self.word_embeddings = VocabParallelEmbedding(config.vocab, config.hidden, parallel, scatters=not learned)
        self.position_embeddings = Embedding(config.max_positions, config.hidden) if learned else None
        if config.token_types:
            self.tokentype_embeddings = Embedding(config.token_types, config.hidden)

    def forward(self, tokens: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        words = self.word_embeddings(tokens)  # a local until the end
        x = words
        if self.position_embeddings is not None:
            places = self.position_embeddings(positions)
            x = words + places
        if not self.word_embeddings.scatters:
            x = x.transpose(0, 1).contiguous()
            x = F.scatter_tokens(x, self.parallel.degree) if self.parallel.splits_tokens else x
        if types is not None:
            x = x + self.tokentype_embeddings(types).permute(1, 0, 2)
        if self.parallel.splits_tokens:
            x = F.clone(x)  # of a view that holds the whole; made in any case
        x = F.dropout(x, self.config.dropout)
        return x


def make_layer(
    config: ModelConfig,
    number: int,
    parallel: TensorParallel,
    expert_parallel: ExpertParallel,
    context: ContextParallel,
) -> TransformerLayer:
    """Layer `number` of the model, with the attention and the experts that the configuration asks for."""
    fp8 = config.fp8
    if fp8 is not None and not fp8.first <= number < config.layers - fp8.last:
        config = replace(config, fp8=None)
    attention: Module = SelfAttention(config, parallel, context, config.window_of(number))
    moe = None
    if config.latent is not None:
        attention = LatentSelfAttention(config, config.latent, parallel, context)
    if config.experts is not None and config.has_experts(number):
        moe = MoeLayer(config, config.experts, parallel, expert_parallel)
    return TransformerLayer(config, parallel, attention, moe)


class MegatronGpt(LanguageModel):
    """The model computes the loss per token; the script makes the position ids and takes the mean."""

    first_parts = ("embedding",)
    last_parts: ClassVar[tuple[str, ...]] = ("final_layernorm", "mtp", "output_layer")
    embedding: LanguageModelEmbedding | None
    final_layernorm: Module | None
    output_layer: ColumnParallelLinear | None

    def __init__(
        self, config: ModelConfig, parallel: TensorParallel, expert_parallel: ExpertParallel, context: ContextParallel
    ) -> None:
        super().__init__(config)
        self.parallel = parallel
        embedding = self.embedding = LanguageModelEmbedding(config, parallel)
        layers = [make_layer(config, n, parallel, expert_parallel, context) for n in range(config.layers)]
        self.layers = ModuleList([*layers])
        self.final_layernorm = make_norm(config, parallel)
        self.mtp: MultiTokenPrediction | None = None
        if config.mtp_layers:
            again = LanguageModelEmbedding(config, parallel)
            again.word_embeddings.weight = embedding.word_embeddings.weight
            number = config.layers - 1  # as the last layer
            further = [
                PredictionLayer(config, parallel, make_layer(config, number, parallel, expert_parallel, context))
                for _ in range(config.mtp_layers)
            ]
            self.mtp = MultiTokenPrediction(again, further)
        output = self.output_layer = ColumnParallelLinear(config.hidden, config.vocab, parallel, bias=False)
        if config.tied_embeddings:
            output.weight = embedding.word_embeddings.weight
        self.name_paths()

    rope: Tensor | None = None

    def make_rope(self, seq_len: int) -> None:
        """Angles of rotary positions, fp32 [S, 1, 1, D], which RotaryEmbedding keeps (its result is cached)."""
        latent = self.config.latent
        width = self.config.head_dim if latent is None else latent.rope_head_dim
        if self.config.rope != "none":
            self.rope = F.empty((seq_len, 1, 1, width), "fp32")

    def compute_loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        positions = F.empty(targets.shape, "int64")
        losses = self(tokens, positions, targets)
        with active().computing_loss(losses):
            return losses.mean(), None

    def stage_output(self, tokens: Tensor) -> Tensor:
        return self(tokens, F.empty(tokens.shape, "int64")) if self.embedding is not None else self(tokens)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        """Loss per token, [B, S]; hidden states of a stage before the last."""
        x = self.embedding(tokens, positions) if self.embedding is not None and positions is not None else tokens
        rope = () if self.rope is None else (self.rope,)
        x = F.fp8_layers_begin(x) if self.config.fp8 is not None else x
        for layer in self.layers:
            x = layer(x, *rope)
        x = F.fp8_layers_end(x) if self.config.fp8 is not None else x
        if self.final_layernorm is None or self.output_layer is None or targets is None:
            return x
        x = self.final_layernorm(x)
        if self.mtp is not None:
            predicted: Any = self.mtp(x, targets, *rope)
            for further in predicted:
                x = R.with_auxiliary_loss(x, self._token_losses(further, targets))
            del predicted, further
        return self._token_losses(x, targets)

    def _token_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """Loss per token, [B, S], of hidden states [S, B, H]."""
        assert self.output_layer is not None
        logits = self.output_layer(x)
        with active().computing_loss(logits):
            labels = targets.transpose(0, 1).contiguous()
            loss = F.vocab_parallel_cross_entropy(logits, labels, self.parallel.degree, self.config.loss_fusion)
            return loss.transpose(0, 1).contiguous()
