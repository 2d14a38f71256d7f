"""A transformer layer as Megatron writes it, one rank of t. Layout [S, B, H]: tokens before batch.

A heads, K kv heads, D head dim, F ffn, t ranks of the tensor-parallel group. GPT: LayerNorm, biases added apart from the
products or in fused kernels, attention written out (masked softmax always fused) or SDPA's. Llama-like models: RMSNorm,
a gated MLP in one product and one fused kernel (or squared ReLU), fused rotary positions, and Transformer Engine's fused
attention.
For 16-bit parameters (the softmax kernel knows no other). Code: megatron-core 0.16; the fused kernels and the order of
communication of GPT are those of 2022 too.
"""

from __future__ import annotations

from sim.model import functional as F
from sim.model.calls import Tensor, active
from sim.model.config import ModelConfig
from sim.model.gpt import LayerNorm
from sim.model.llama import FusedRMSNorm
from sim.model.module import Module, Parameter
from sim.model.shard.context import ContextParallel
from sim.model.shard.tensor import TensorParallel, norm_of_tokens
from sim.model.transformer_engine import Identity, column_linear, row_linear


class PersistentLayerNorm(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.persistent_layer_norm(x, self.weight, self.bias)


class PersistentRMSNorm(FusedRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.persistent_rms_norm(x, self.weight)


def norm_over(width: int, config: ModelConfig) -> Module:
    """The model's kind of norm over the last dimension, by the kernel that it asks for."""
    if config.norm == "layer_norm":
        return PersistentLayerNorm(width) if config.persistent_norm else LayerNorm(width)
    return PersistentRMSNorm(width) if config.persistent_norm else FusedRMSNorm(width)


def make_norm(config: ModelConfig, parallel: TensorParallel, width: int | None = None) -> Module:
    """Of a rank's tokens, over `width` numbers each (None: the hidden state)."""
    return norm_of_tokens(norm_over(width or config.hidden, config), parallel)


def norm_of_heads(config: ModelConfig, parallel: TensorParallel) -> Module:
    """Over each head's q or k: every rank has the whole weight, and its heads' part of the gradient."""
    norm = norm_over(config.head_dim, config)
    for parameter in norm.parameters():
        parameter.partial = parallel.degree > 1
    return norm


def norm_inside(config: ModelConfig) -> bool:
    """Is the norm before attention part of its projection? The compressed projections of latent attention share it, and
    so does an adapter."""
    return config.fp8 is not None and config.latent is None and config.lora is None


class CoreAttention(Module):
    """Attention over this rank's heads, q [S, B, A/t, D], k and v [S, B, K/t, D]; the result is [S, B, A/t * D].

    S are the tokens of one context-parallel rank.
    """

    window = 0

    def __init__(self, config: ModelConfig, context: ContextParallel) -> None:
        self.config = config
        self.context = context

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s, b, a, d = q.shape
        if self.config.family == "llama" or self.context.degree > 1:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            return F.fused_attention(q, k, v, self.context, self.window).view(s, b, a * d)
        if self.config.attention != "unfused":
            return self._fused(q, k, v)
        keys = k.shape[0]
        q = q.view(s, b * a, d)
        k = k.view(keys, b * a, d)
        F.global_buffer(b * a * s * keys, q.dtype)  # baddbmm's input, which beta = 0 ignores
        scores = F.scaled_bmm(q.transpose(0, 1), k.transpose(0, 1).transpose(1, 2))
        probabilities = F.causal_softmax(scores)
        probabilities = F.dropout(probabilities, self.config.dropout)
        v = v.view(keys, b * a, d)
        context = F.bmm(probabilities, v.transpose(0, 1))
        context = context.transpose(0, 1).contiguous()
        return context.view(s, b, a * d)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """SDPA's kernel on [B, A, S, D]."""
        s, b, a, d = q.shape
        q, k, v = (x.transpose(0, 1).transpose(1, 2) for x in (q, k, v))
        kernel = "math" if self.config.attention == "math" else "sdpa"
        causal = self.config.family == "gpt"
        context = F.attention(q, k, v, dropout_p=self.config.dropout, kernel=kernel, causal=causal)
        return context.transpose(1, 2).transpose(0, 1).contiguous().view(s, b, a * d)


class WindowedCoreAttention(CoreAttention):
    """A query sees the keys of its window alone. A class of its own: its layers are not like the others."""

    def __init__(self, config: ModelConfig, context: ContextParallel) -> None:
        super().__init__(config, context)
        self.window = config.window


class SelfAttention(Module):
    """The bias of the output projection is left to the caller. `rope`: angles [S, 1, 1, D], where positions are rotary."""

    def __init__(
        self, config: ModelConfig, parallel: TensorParallel, context: ContextParallel, window: int = 0
    ) -> None:
        h, d = config.hidden, config.head_dim
        self.config = config
        self.groups = config.kv_heads // parallel.degree
        self.core_attention: Module = (WindowedCoreAttention if window else CoreAttention)(config, context)
        self.linear_proj = row_linear(config, config.heads * d, h, parallel, config.bias)
        width = (config.heads + 2 * config.kv_heads) * d
        norm = make_norm(config, parallel) if norm_inside(config) else None
        self.linear_qkv = column_linear(config, h, width, parallel, config.bias or config.qkv_bias, norm=norm)
        if config.qk_norm:
            self.q_layernorm, self.k_layernorm = norm_of_heads(config, parallel), norm_of_heads(config, parallel)

    def forward(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        d, queries = self.config.head_dim, self.config.heads // self.config.kv_heads
        mixed = self.linear_qkv(x)  # of each kv head's group its queries, key and value side by side
        s, b, _ = mixed.shape
        mixed = mixed.view(s, b, self.groups, (queries + 2) * d)
        q, k, v = mixed.split((queries * d, d, d))
        if queries > 1:
            q = q.reshape(s, b, self.groups * queries, d)
        if self.config.qk_norm:
            q = self.q_layernorm(q)
            k = self.k_layernorm(k)
        if rope is not None:
            q = F.fused_rope(q, rope)
            k = F.fused_rope(k, rope)
        return self.linear_proj(self.core_attention(q, k, v))


class Gelu(Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class SwiGlu(Module):
    """[S, B, 2 F/t], gate and value, to [S, B, F/t]: in one kernel, or written out."""

    def __init__(self, config: ModelConfig) -> None:
        self.fused, self.stores_fp8 = config.swiglu_fusion, config.fp8_swiglu_input

    def forward(self, x: Tensor) -> Tensor:
        if self.stores_fp8:
            return F.stored_swiglu(x)
        if self.fused:
            return F.swiglu(x)
        gate, value = x.split(x.shape[-1] // 2)
        return F.silu(gate) * value


class SquaredRelu(Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.squared_relu(x)


def plain_activation(config: ModelConfig) -> Module:
    """The activation of an MLP without a gate."""
    return SquaredRelu() if config.activation == "squared_relu" else Gelu()


class Mlp(Module):
    """The bias of the second projection is left to the caller. `norm`: in 8 bit, part of the first."""

    def __init__(
        self, config: ModelConfig, parallel: TensorParallel, ffn_hidden: int | None = None, norm: Module | None = None
    ) -> None:
        h, ffn, gated = config.hidden, ffn_hidden or config.ffn_hidden, config.activation == "silu"
        self.config = config
        self.linear_fc1 = column_linear(config, h, 2 * ffn if gated else ffn, parallel, config.bias, True, norm)
        self.activation_func: Module = SwiGlu(config) if gated else plain_activation(config)
        self.linear_fc2 = row_linear(config, ffn, h, parallel, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear_fc1(x)
        if self.config.bias and self.config.bias_gelu_fusion:
            x = F.bias_gelu(x, self.linear_fc1.bias)
            return self.linear_fc2(x)
        if self.config.bias:
            x = F.add_bias(x, self.linear_fc1.bias)
        x = self.activation_func(x)
        return self.linear_fc2(x)


def bias_dropout_add(x: Tensor, bias: Parameter | None, residual: Tensor, config: ModelConfig) -> Tensor:
    """residual + dropout(x + bias of the layer that made x). Runs under enable_grad (bias_dropout_add_exec_handler), so
    that in a reentrant region's forward the dropout's mask is saved until the layer's result becomes the region's."""
    with active().enable_grad():
        if config.bias_dropout_fusion:
            return F.bias_dropout_add(x, bias, residual, config.dropout)
        biased = F.add_bias(x, bias) if bias is not None else x
        out = F.dropout(biased, config.dropout)
        out = residual + out
        return out


class TransformerLayer(Module):
    """On S tokens, with sequence parallelism on S/t. `rope`: see SelfAttention. `moe`: experts in the MLP's place."""

    def __init__(
        self, config: ModelConfig, parallel: TensorParallel, attention: Module, moe: Module | None = None
    ) -> None:
        self.config = config
        self.input_layernorm = Identity() if norm_inside(config) else make_norm(config, parallel)
        self.self_attention = attention
        norm = make_norm(config, parallel)
        inside = config.fp8 is not None and moe is None
        self.pre_mlp_layernorm = Identity() if inside else norm
        self.mlp = Mlp(config, parallel, norm=norm if inside else None) if moe is None else None
        self.moe = moe
        self.biases: tuple[Parameter | None, ...] = (None, None)
        if config.bias and self.mlp is not None:
            self.biases = (vars(self.self_attention)["linear_proj"].bias, self.mlp.linear_fc2.bias)

    def forward(self, x: Tensor, *rope: Tensor) -> Tensor:
        x = self._attend(x, *rope)
        return self._expand(x)

    def _attend(self, x: Tensor, *rope: Tensor) -> Tensor:
        normed = self.input_layernorm(x)  # a local until the end
        branch = self.self_attention(normed, *rope)
        return bias_dropout_add(branch, self.biases[0], x, self.config)

    def _expand(self, x: Tensor) -> Tensor:
        normed = self.pre_mlp_layernorm(x)
        branch = self.mlp(normed) if self.mlp is not None else self._experts(normed)
        return bias_dropout_add(branch, self.biases[1], x, self.config)

    def _experts(self, x: Tensor) -> Tensor:
        assert self.moe is not None
        return self.moe(x)
