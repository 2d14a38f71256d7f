"""GPT as Megatron writes it without Transformer Engine, one rank of t. Layout [S, B, H]: tokens before batch.

A heads, D head dim, F ffn, V vocab, t ranks of the tensor-parallel group. Attention is written out (masked softmax
always fused), biases are added apart from the products or in fused kernels. For 16-bit parameters (the softmax kernel
knows no other). Code: megatron-core 0.16; the fused kernels and the order of communication are those of 2022 too.
A layer saves (10 + 24/t) sbh + 5/t a s^2 b bytes, or 1/t of it all with sequence parallelism, and 16 sb (16/t sb) of
statistics (Korthikanti et al. 2022, with fp32 statistics).
"""

from __future__ import annotations

from sim.model import functional as F
from sim.model.calls import Tensor, active
from sim.model.config import ModelConfig
from sim.model.gpt import LayerNorm
from sim.model.language_model import Embedding, LanguageModel
from sim.model.module import Module, ModuleList
from sim.model.shard.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    norm_of_tokens,
)


class CoreAttention(Module):
    """Attention over this rank's heads, q, k, v [S, B, A/t, D]; the result is [S, B, H/t]."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.config.attention != "unfused":
            return self._fused(q, k, v)
        s, b, a, d = q.shape
        q = q.view(s, b * a, d)
        k = k.view(s, b * a, d)
        F.global_buffer(b * a * s * s, q.dtype)  # baddbmm's input, which beta = 0 ignores
        scores = F.scaled_bmm(q.transpose(0, 1), k.transpose(0, 1).transpose(1, 2))
        probabilities = F.causal_softmax(scores)
        probabilities = F.dropout(probabilities, self.config.dropout)
        v = v.view(s, b * a, d)
        context = F.bmm(probabilities, v.transpose(0, 1))
        context = context.transpose(0, 1).contiguous()
        return context.view(s, b, a * d)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """SDPA's kernel on [B, A, S, D]."""
        s, b, a, d = q.shape
        q, k, v = (x.transpose(0, 1).transpose(1, 2) for x in (q, k, v))
        kernel = "math" if self.config.attention == "math" else "sdpa"
        context = F.attention(q, k, v, dropout_p=self.config.dropout, kernel=kernel)
        return context.transpose(1, 2).transpose(0, 1).contiguous().view(s, b, a * d)


class SelfAttention(Module):
    """The bias of the output projection is left to the caller."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        h, width = config.hidden, config.heads * config.head_dim
        self.config = config
        self.heads = config.heads // parallel.degree
        self.core_attention: Module = CoreAttention(config)
        self.linear_proj = RowParallelLinear(width, h, parallel, config.bias)
        self.linear_qkv = ColumnParallelLinear(h, 3 * width, parallel, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        c = self.config
        mixed = self.linear_qkv(x)
        s, b, _ = mixed.shape
        mixed = mixed.view(s, b, self.heads, 3 * c.head_dim)
        q, k, v = mixed.split(c.head_dim)
        return self.linear_proj(self.core_attention(q, k, v))


class Gelu(Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class Mlp(Module):
    """The bias of the second projection is left to the caller."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        h, ffn = config.hidden, config.ffn_hidden
        self.config = config
        self.linear_fc1 = ColumnParallelLinear(h, ffn, parallel, config.bias, skip_bias_add=True)
        self.activation_func = Gelu()
        self.linear_fc2 = RowParallelLinear(ffn, h, parallel, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear_fc1(x)
        if self.config.bias and self.config.bias_gelu_fusion:
            x = F.bias_gelu(x, self.linear_fc1.bias)
            return self.linear_fc2(x)
        if self.config.bias:
            x = F.add_bias(x, self.linear_fc1.bias)
        x = self.activation_func(x)
        return self.linear_fc2(x)


def bias_dropout_add(x: Tensor, linear: RowParallelLinear, residual: Tensor, config: ModelConfig) -> Tensor:
    """residual + dropout(x + bias of the layer that made x). Runs under enable_grad (bias_dropout_add_exec_handler), so
    that in a reentrant region's forward the dropout's mask is saved until the layer's result becomes the region's."""
    bias = linear.bias if config.bias else None
    with active().enable_grad():
        if config.bias_dropout_fusion:
            return F.bias_dropout_add(x, bias, residual, config.dropout)
        biased = F.add_bias(x, bias) if bias is not None else x
        out = F.dropout(biased, config.dropout)
        out = residual + out
        return out


class TransformerLayer(Module):
    """On S tokens, with sequence parallelism on S/t."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        self.config = config
        self.input_layernorm = norm_of_tokens(LayerNorm(config.hidden), parallel)
        self.self_attention = SelfAttention(config, parallel)
        self.pre_mlp_layernorm = norm_of_tokens(LayerNorm(config.hidden), parallel)
        self.mlp = Mlp(config, parallel)
        self.output_linears = (self.self_attention.linear_proj, self.mlp.linear_fc2)

    def forward(self, x: Tensor) -> Tensor:
        x = self._attend(x)
        return self._expand(x)

    def _attend(self, x: Tensor) -> Tensor:
        normed = self.input_layernorm(x)  # a local until the end
        branch = self.self_attention(normed)
        return bias_dropout_add(branch, self.output_linears[0], x, self.config)

    def _expand(self, x: Tensor) -> Tensor:
        normed = self.pre_mlp_layernorm(x)
        branch = self.mlp(normed)
        return bias_dropout_add(branch, self.output_linears[1], x, self.config)


class LanguageModelEmbedding(Module):
    """Word and position embeddings [B, S, H], added, transposed by a copy to [S, B, H], dropped out.

    With sequence parallelism each rank copies its S/t tokens out of the whole.
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        self.config = config
        self.parallel = parallel
        self.word_embeddings = VocabParallelEmbedding(config.vocab, config.hidden, parallel)
        self.position_embeddings = Embedding(config.max_positions, config.hidden)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        words = self.word_embeddings(tokens)
        places = self.position_embeddings(positions)
        x = words + places
        x = x.transpose(0, 1).contiguous()
        if self.parallel.splits_tokens:
            x = F.clone(F.scatter_tokens(x, self.parallel.degree))
        x = F.dropout(x, self.config.dropout)
        return x


class MegatronGpt(LanguageModel):
    """The model computes the loss per token; the script makes the position ids and takes the mean."""

    first_parts = ("embedding",)
    last_parts = ("final_layernorm", "output_layer")
    embedding: LanguageModelEmbedding | None
    final_layernorm: Module | None
    output_layer: ColumnParallelLinear | None

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__(config)
        self.parallel = parallel
        embedding = self.embedding = LanguageModelEmbedding(config, parallel)
        self.layers = ModuleList([TransformerLayer(config, parallel) for _ in range(config.layers)])
        self.final_layernorm = norm_of_tokens(LayerNorm(config.hidden), parallel)
        output = self.output_layer = ColumnParallelLinear(config.hidden, config.vocab, parallel, bias=False)
        if config.tied_embeddings:
            output.weight = embedding.word_embeddings.weight
        self.name_paths()

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
        for layer in self.layers:
            x = layer(x)
        if self.final_layernorm is None or self.output_layer is None or targets is None:
            return x
        x = self.final_layernorm(x)
        logits = self.output_layer(x)
        with active().computing_loss(logits):
            labels = targets.transpose(0, 1).contiguous()
            loss = F.vocab_parallel_cross_entropy(logits, labels, self.parallel.degree)
            return loss.transpose(0, 1).contiguous()
