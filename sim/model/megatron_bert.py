"""Megatron's BertModel, one rank of t: GPT's layers under a padding mask, with the heads of BERT's two tasks.

Layout [S, B, H]; V vocabulary. Pre-norm layers as GPT's (megatron-core 0.16, models/bert), scores masked in the same fused
softmax. Read in its source, not recorded.
"""

from __future__ import annotations

from sim.model import functional as F
from sim.model.calls import Tensor, active
from sim.model.config import ModelConfig
from sim.model.experts import ExpertParallel
from sim.model.language_model import Linear
from sim.model.megatron_gpt import MegatronGpt
from sim.model.megatron_layer import norm_over
from sim.model.module import Module
from sim.model.shard.context import ContextParallel
from sim.model.shard.tensor import ColumnParallelLinear, TensorParallel


class BertLMHead(Module):
    """Whole on every rank."""

    def __init__(self, config: ModelConfig) -> None:
        self.dense = Linear(config.hidden, config.hidden, bias=True)
        self.layer_norm = norm_over(config.hidden, config)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        x = F.gelu(x)
        x = self.layer_norm(x)
        return x


class Pooler(Module):
    """tanh(W x + b) of the first token, [B, H]."""

    def __init__(self, config: ModelConfig) -> None:
        self.dense = Linear(config.hidden, config.hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.select(0, 0)
        pooled = self.dense(pooled)
        pooled = F.tanh(pooled)
        return pooled


def extended_mask(batch: int, length: int) -> Tensor:
    """bert_extended_attention_mask: [B, 1, S, S] out of padding [B, S]; the product lives until the mask is there."""
    pairs = F.compute("mul", (batch, length, length), "int64")
    return F.compute("lt", (batch, 1, length, length), "bool", pairs)


class MegatronBert(MegatronGpt):
    """Loss per token, and that of the order of two sentences."""

    last_parts = ("final_layernorm", "lm_head", "pooler", "binary_head", "output_layer")
    lm_head: BertLMHead | None
    pooler: Pooler | None
    binary_head: Linear | None

    def __init__(
        self, config: ModelConfig, parallel: TensorParallel, expert_parallel: ExpertParallel, context: ContextParallel
    ) -> None:
        super().__init__(config, parallel, expert_parallel, context)
        self.lm_head = BertLMHead(config)
        output = self.output_layer
        assert output is not None
        del self.output_layer  # its place is behind the head
        biased = self.output_layer = ColumnParallelLinear(config.hidden, config.vocab, parallel)
        biased.weight = output.weight
        self.binary_head = Linear(config.hidden, 2, bias=True)
        self.pooler = Pooler(config)
        self.name_paths()

    def compute_loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """The script holds token types, padding and which targets count beside ids and targets."""
        batch, length = targets.shape
        held = [F.empty((batch, length), "int64") for _ in range(3)]
        positions = F.empty(targets.shape, "int64")
        loss, order = self._losses(tokens, positions, targets)
        with active().computing_loss(loss):
            total = loss.mean() + F.cross_entropy(order.float(), F.empty((batch,), "int64"))
        del held
        return total, None

    def _losses(self, tokens: Tensor, positions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        losses: tuple[Tensor, Tensor] = self(tokens, positions, targets)  # type: ignore[assignment]
        return losses

    def forward(self, tokens: Tensor, positions: Tensor | None = None, targets: Tensor | None = None) -> object:  # type: ignore[override]
        """Loss per token [B, S] and scores of the order [B, 2]; hidden states of a stage before the last."""
        if self.embedding is not None and positions is not None:
            batch, length = tokens.shape
            x = self.embedding(tokens, positions, F.empty(tokens.shape, "int64"))
        else:
            length, batch, _ = tokens.shape
            x = tokens
        mask = extended_mask(batch, length)
        for layer in self.layers:
            x = layer(x)
        if self.final_layernorm is None or self.output_layer is None or targets is None:
            return x
        assert self.pooler is not None and self.lm_head is not None and self.binary_head is not None
        x = self.final_layernorm(x)
        pooled = self.pooler(x)
        transformed = self.lm_head(x)
        logits = self.output_layer(transformed)
        order = self.binary_head(pooled)
        with active().computing_loss(logits):
            labels = targets.transpose(0, 1).contiguous()
            loss = F.vocab_parallel_cross_entropy(logits, labels, self.parallel.degree, self.config.loss_fusion)
            del mask
            return loss.transpose(0, 1).contiguous(), order
