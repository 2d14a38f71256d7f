"""GPT as Megatron-core 0.16 writes it without Transformer Engine, on one rank. Layout [S, B, H]: tokens before batch.

A heads, D head dim, F ffn, V vocab. Fusions are off but for the masked softmax: attention is written out, biases are
added apart from the products. For 16-bit parameters (the softmax kernel knows no other).
A layer saves 34 sbh + 5 a s^2 b bytes and 16 sb of statistics (Korthikanti et al. 2022, with fp32 statistics).
"""

from __future__ import annotations

from sim.model import functional as F
from sim.model.calls import Tensor, active
from sim.model.config import ModelConfig
from sim.model.gpt import LayerNorm
from sim.model.language_model import Embedding, LanguageModel
from sim.model.module import Module, ModuleList, Parameter


class ParallelLinear(Module):
    """A product; its bias is added inside, or left to the caller (`skip_bias_add`)."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True, skip_bias_add: bool = False) -> None:
        self.weight = Parameter(outputs, inputs)
        if bias:
            self.bias = Parameter(outputs)
        self.adds_bias = bias and not skip_bias_add

    def forward(self, x: Tensor) -> Tensor:
        return F.parallel_linear(x, self.weight, self.bias if self.adds_bias else None)


class CoreAttention(Module):
    """Attention over q, k, v [S, B, A, D]; the result is [S, B, H]."""

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

    def __init__(self, config: ModelConfig) -> None:
        h = config.hidden
        self.config = config
        self.core_attention = CoreAttention(config)
        self.linear_proj = ParallelLinear(h, h, config.bias, skip_bias_add=True)
        self.linear_qkv = ParallelLinear(h, 3 * h, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        s, b, _ = x.shape
        c = self.config
        mixed = self.linear_qkv(x)
        mixed = mixed.view(s, b, c.heads, 3 * c.head_dim)
        q, k, v = mixed.split(c.head_dim)
        return self.linear_proj(self.core_attention(q, k, v))


class Gelu(Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class Mlp(Module):
    """The bias of the second projection is left to the caller."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.linear_fc1 = ParallelLinear(config.hidden, config.ffn_hidden, config.bias, skip_bias_add=True)
        self.activation_func = Gelu()
        self.linear_fc2 = ParallelLinear(config.ffn_hidden, config.hidden, config.bias, skip_bias_add=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear_fc1(x)
        if self.config.bias:
            x = F.add_bias(x, self.linear_fc1.bias)
        x = self.activation_func(x)
        return self.linear_fc2(x)


def bias_dropout_add(x: Tensor, linear: ParallelLinear, residual: Tensor, p: float) -> Tensor:
    """residual + dropout(x + bias of the layer that made x). Runs under enable_grad (bias_dropout_add_exec_handler), so
    that in a reentrant region's forward the dropout's mask is saved until the layer's result becomes the region's."""
    with active().enable_grad():
        biased = F.add_bias(x, linear.bias) if hasattr(linear, "bias") else x
        out = F.dropout(biased, p)
        out = residual + out
        return out


class TransformerLayer(Module):
    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.input_layernorm = LayerNorm(config.hidden)
        self.self_attention = SelfAttention(config)
        self.pre_mlp_layernorm = LayerNorm(config.hidden)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = self._attend(x)
        return self._expand(x)

    def _attend(self, x: Tensor) -> Tensor:
        normed = self.input_layernorm(x)  # a local until the end
        branch = self.self_attention(normed)
        return bias_dropout_add(branch, self.self_attention.linear_proj, x, self.config.dropout)

    def _expand(self, x: Tensor) -> Tensor:
        normed = self.pre_mlp_layernorm(x)
        branch = self.mlp(normed)
        return bias_dropout_add(branch, self.mlp.linear_fc2, x, self.config.dropout)


class LanguageModelEmbedding(Module):
    """Word and position embeddings [B, S, H], added, transposed by a copy to [S, B, H], dropped out."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.word_embeddings = Embedding(config.vocab, config.hidden)
        self.position_embeddings = Embedding(config.max_positions, config.hidden)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        words = self.word_embeddings(tokens)
        places = self.position_embeddings(positions)
        x = words + places
        x = x.transpose(0, 1).contiguous()
        x = F.dropout(x, self.config.dropout)
        return x


class MegatronGpt(LanguageModel):
    """The model computes the loss per token; the script makes the position ids and takes the mean."""

    first_parts = ("embedding",)
    last_parts = ("final_layernorm", "output_layer")
    embedding: LanguageModelEmbedding | None
    final_layernorm: LayerNorm | None
    output_layer: ParallelLinear | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        embedding = self.embedding = LanguageModelEmbedding(config)
        self.layers = ModuleList([TransformerLayer(config) for _ in range(config.layers)])
        self.final_layernorm = LayerNorm(config.hidden)
        output = self.output_layer = ParallelLinear(config.hidden, config.vocab, bias=False)
        if config.tied_embeddings:
            output.weight = embedding.word_embeddings.weight
        self.name_paths()

    def compute_loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        positions = F.empty(targets.shape, "int64")
        losses = self(tokens, positions, targets)
        with active().computing_loss(losses):
            return losses.mean(), None

    def hidden_states(self, tokens: Tensor) -> Tensor:
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
            loss = F.vocab_parallel_cross_entropy(logits, labels)
            return loss.transpose(0, 1).contiguous()
