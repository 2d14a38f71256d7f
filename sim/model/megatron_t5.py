"""Megatron's T5Model, one rank of t: GPT's layers as encoder, the same with attention across the stacks as decoder.

Layout [S, B, H] for S source tokens, [T, B, H] for T target tokens; A heads, D head dim, V vocabulary. Learned positions
and biases, unlike the published T5 (megatron-core 0.16, models/T5). Read in its source, not recorded.
"""

from __future__ import annotations

from sim.model import functional as F
from sim.model.calls import Tensor, active
from sim.model.config import ModelConfig
from sim.model.experts import ExpertParallel
from sim.model.language_model import InputShape, LanguageModel
from sim.model.megatron_gpt import LanguageModelEmbedding
from sim.model.megatron_layer import CoreAttention, SelfAttention, TransformerLayer, bias_dropout_add, make_norm
from sim.model.module import Module, ModuleList
from sim.model.shard.context import ContextParallel
from sim.model.shard.tensor import ColumnParallelLinear, RowParallelLinear, TensorParallel


class CrossAttention(Module):
    """Queries from the target, keys and values from what the encoder gave."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, context: ContextParallel) -> None:
        h, d = config.hidden, config.head_dim
        self.config = config
        self.heads = config.heads // parallel.degree
        self.core_attention: Module = CoreAttention(config, context)
        self.linear_proj = RowParallelLinear(config.heads * d, h, parallel, config.bias)
        self.linear_q = ColumnParallelLinear(h, config.heads * d, parallel, config.bias)
        self.linear_kv = ColumnParallelLinear(h, 2 * config.heads * d, parallel, config.bias)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        d = self.config.head_dim
        mixed = self.linear_kv(source)
        length, b, _ = mixed.shape
        mixed = mixed.view(length, b, self.heads, 2 * d)
        k, v = mixed.split((d, d))
        q = self.linear_q(x)
        q = q.view(q.shape[0], b, self.heads, d)
        return self.linear_proj(self.core_attention(q, k, v))


class DecoderLayer(TransformerLayer):
    """Attention to the target, attention to the source, MLP."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, context: ContextParallel) -> None:
        super().__init__(config, parallel, SelfAttention(config, parallel, context))
        self.pre_cross_attn_layernorm = make_norm(config, parallel)
        self.cross_attention = CrossAttention(config, parallel, context)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        (source,) = others
        x = self._attend(x)
        x = self._attend_across(x, source)
        return self._expand(x)

    def _attend_across(self, x: Tensor, source: Tensor) -> Tensor:
        normed = self.pre_cross_attn_layernorm(x)
        branch = self.cross_attention(normed, source)
        bias = self.cross_attention.linear_proj.bias if self.config.bias else None
        return bias_dropout_add(branch, bias, x, self.config)


class MegatronT5(LanguageModel):
    """Loss per target token. The embedding serves both stacks and the head."""

    def __init__(
        self, config: ModelConfig, parallel: TensorParallel, expert_parallel: ExpertParallel, context: ContextParallel
    ) -> None:
        super().__init__(config)
        self.parallel = parallel
        self.embedding = LanguageModelEmbedding(config, parallel)
        encoder = [
            TransformerLayer(config, parallel, SelfAttention(config, parallel, context)) for _ in range(config.layers)
        ]
        self.layers = ModuleList([*encoder])
        self.final_layernorm = make_norm(config, parallel)
        decoder = [DecoderLayer(config, parallel, context) for _ in range(config.decoder_layers)]
        self.decoder_layers = ModuleList([*decoder])
        self.decoder_layernorm = make_norm(config, parallel)
        self.lm_head = ColumnParallelLinear(config.hidden, config.vocab, parallel)
        self.lm_head.weight = self.embedding.word_embeddings.weight
        self.name_paths()

    def stacks(self) -> tuple[ModuleList, ...]:
        return self.layers, self.decoder_layers

    def inputs(self, sequences: int, seq_len: int, target_len: int) -> tuple[InputShape, InputShape]:
        return ((sequences, seq_len), "int64"), ((sequences, target_len), "int64")

    def compute_loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """The script holds decoder ids, a loss mask and the three masks of attention beside ids and targets."""
        (batch, source), target = tokens.shape, targets.shape[1]
        shapes = ((batch, source, source), (batch, target, target), (batch, target, source))
        masks = [F.empty(shape, "bool") for shape in shapes]
        held = F.empty((batch, target), "int64"), F.empty((batch, target), "fp32")
        losses = self(tokens, held[0], targets)
        with active().computing_loss(losses):
            loss = losses.mean()
        del masks, held
        return loss, None

    def forward(self, tokens: Tensor, decoder_ids: Tensor, targets: Tensor) -> Tensor:
        """Loss per token, [B, T]."""
        source = self.embedding(tokens, F.empty(tokens.shape, "int64"))
        for layer in self.layers:
            source = layer(source)
        source = self.final_layernorm(source)
        x = self.embedding(decoder_ids, F.empty(decoder_ids.shape, "int64"))
        for layer in self.decoder_layers:
            x = layer(x, source)
        x = self.decoder_layernorm(x)
        logits = self.lm_head(x)
        with active().computing_loss(logits):
            labels = targets.transpose(0, 1).contiguous()
            loss = F.vocab_parallel_cross_entropy(logits, labels, self.parallel.degree, self.config.loss_fusion)
            return loss.transpose(0, 1).contiguous()
