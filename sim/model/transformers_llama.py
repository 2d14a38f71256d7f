"""Llama as transformers 5.24 writes it; Qwen2, Qwen3 and Mistral (without sliding window) are the same code.

B batch, S sequence, H hidden, A heads, K kv heads, D head dim. RMSNorm runs op by op, cos and sin are computed once per
forward in the dtype of the embeddings, queries and keys are rotated in their own dtype with heads before tokens.
"""

from __future__ import annotations

from typing import Any

from sim.model import functional as F
from sim.model import liger
from sim.model.calls import Tensor
from sim.model.config import ModelConfig
from sim.model.language_model import Embedding, Linear
from sim.model.llama import FusedRMSNorm
from sim.model.module import Buffer, Module, ModuleList, Parameter
from sim.model.shard.context import ContextParallel
from sim.model.shard.ulysses import attend_by_heads
from sim.model.transformers_common import (
    TransformersModel,
    check_packed_sequences,
    make_position_ids,
    make_sliding_mask,
)
from sim.model.transformers_moe import SparseMoeBlock


class LlamaRMSNorm(Module):
    """In fp32; the local is rebound to the normalized tensor, and the weight comes first in the product."""

    def __init__(self, width: int) -> None:
        self.weight = Parameter(width)

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = hidden.dtype
        hidden = hidden.float()
        variance = hidden.square().mean_last()
        hidden = hidden * (variance + 1e-6).rsqrt()
        return F.scale_by(hidden.to(dtype), self.weight, weight_first=True)


class LigerRMSNorm(Module):
    """One kernel of Liger's."""

    def __init__(self, width: int) -> None:
        self.weight = Parameter(width)

    def forward(self, x: Tensor) -> Tensor:
        return liger.rms_norm(x, self.weight)


def make_norm(config: ModelConfig, width: int) -> Module:
    if "rms_norm" in config.liger:
        return LigerRMSNorm(width)
    return FusedRMSNorm(width) if config.norm == "fused" else LlamaRMSNorm(width)


class LlamaRotaryEmbedding(Module):
    """cos and sin [1, S, D] for one forward, made in fp32 and cast to the dtype of x."""

    def __init__(self, head_dim: int) -> None:
        self.head_dim = head_dim
        self.inv_freq = Buffer("fp32", head_dim // 2)
        self.original_inv_freq = Buffer("fp32", head_dim // 2)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        length, d = position_ids.shape[1], self.head_dim
        frequencies = F.compute(
            "mul", (1, length, d // 2), "fp32", F.compute("_to_copy", (1, length), "fp32", position_ids)
        )
        angles = F.compute("cat", (1, length, d), "fp32", frequencies)
        cos = F.compute("mul", angles.shape, "fp32", F.compute("cos", angles.shape, "fp32", angles))
        sin = F.compute("mul", angles.shape, "fp32", F.compute("sin", angles.shape, "fp32", angles))
        return cos.to(x.dtype), sin.to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    """Both halves are taken before one is negated: the order of the graph's nodes."""
    half = x.shape[-1] // 2
    first = x.narrow(-1, 0, half)
    second = x.narrow(-1, half, half)
    return F.cat_last((-second, first))


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q, k [B, heads, S, D] rotated; cos, sin [1, S, D]."""
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    rotated_q = (q * cos) + (rotate_half(q) * sin)
    rotated_k = (k * cos) + (rotate_half(k) * sin)
    return rotated_q, rotated_k


def repeat_kv(x: Tensor, times: int) -> Tensor:
    """[B, K, S, D] to [B, K * times, S, D] by expand and reshape, which copies."""
    b, k, s, d = x.shape
    return x.unsqueeze(2).expand(b, k, times, s, d).reshape(b, k * times, s, d)


class LlamaAttention(Module):
    """`ranks` share every sequence by DeepSpeed-Ulysses."""

    def __init__(self, config: ModelConfig, ranks: int = 1) -> None:
        h, d = config.hidden, config.head_dim
        self.config = config
        self.ranks = ranks
        self.q_proj = Linear(h, config.heads * d, config.qkv_bias)
        self.k_proj = Linear(h, config.kv_heads * d, config.qkv_bias)
        self.v_proj = Linear(h, config.kv_heads * d, config.qkv_bias)
        self.o_proj = Linear(config.heads * d, h)
        if config.qk_norm:
            self.q_norm, self.k_norm = make_norm(config, d), make_norm(config, d)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        c = self.config
        q = self.q_proj(x).view(b, s, -1, c.head_dim)
        if c.qk_norm:
            q = self.q_norm(q)
        q = q.transpose(1, 2)
        k = self.k_proj(x).view(b, s, -1, c.head_dim)
        if c.qk_norm:
            k = self.k_norm(k)
        k = k.transpose(1, 2)
        v = self.v_proj(x).view(b, s, -1, c.head_dim).transpose(1, 2)
        q, k = liger.rope(q, k, cos, sin) if "rope" in c.liger else apply_rotary(q, k, cos, sin)
        y = self._attend(q, k, v) if self.ranks == 1 else attend_by_heads(q, k, v, self.ranks, self._attend)
        return self.o_proj(y.reshape(b, s, -1).contiguous())

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """transformers' call of SDPA: [B, S, A, D] in plain order."""
        c = self.config
        if c.gqa == "repeat" and (times := q.shape[1] // k.shape[1]) > 1:
            k = repeat_kv(k, times)
            v = repeat_kv(v, times)
        y = F.attention(q, k, v, kernel="math" if c.attention == "math" else "sdpa")
        return y.transpose(1, 2).contiguous()


class LlamaMLP(Module):
    def __init__(self, config: ModelConfig) -> None:
        h, f = config.hidden, config.ffn_hidden
        self.fused = "swiglu" in config.liger
        self.tiles = config.mlp_tiles
        self.gate_proj, self.up_proj, self.down_proj = Linear(h, f), Linear(h, f), Linear(f, h)

    def forward(self, x: Tensor) -> Tensor:
        return F.tiled(self._whole, x, self.tiles)

    def _whole(self, x: Tensor) -> Tensor:
        if self.fused:
            return self.down_proj(liger.swiglu(self.gate_proj(x), self.up_proj(x)))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaDecoderLayer(Module):
    """One block. Its call also carries the position ids, which a checkpointed region therefore keeps."""

    def __init__(self, config: ModelConfig, number: int = 0, ranks: int = 1) -> None:
        experts = config.experts
        has_experts = experts is not None and config.has_experts(number)
        self.self_attn = LlamaAttention(config, ranks)
        self.mlp: Module = SparseMoeBlock(config, experts) if has_experts and experts else LlamaMLP(config)
        self.input_layernorm = make_norm(config, config.hidden)
        self.post_attention_layernorm = make_norm(config, config.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        x = self.self_attn(x, cos, sin)
        x = residual + x
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        return residual + x


class LlamaForCausalLM(TransformersModel):
    """LlamaModel and its head in one module; no attention mask is given, no cache kept."""

    def __init__(self, config: ModelConfig, context: ContextParallel | None = None) -> None:
        super().__init__(config)
        self.post_norm = "rms_norm" in config.liger
        ranks = context.degree if context is not None else 1
        self.embed_tokens = Embedding(config.vocab, config.hidden)
        self.layers = ModuleList([LlamaDecoderLayer(config, number, ranks) for number in range(config.layers)])
        self.norm = make_norm(config, config.hidden)
        self.rotary_emb = LlamaRotaryEmbedding(config.head_dim)
        self.lm_head = Linear(config.hidden, config.vocab)
        if config.tied_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.name_paths()

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """LlamaModel.forward: the embeddings stay a local of it until it returns."""
        embeddings = self.embed_tokens(tokens)
        position_ids = make_position_ids(tokens.shape[1])
        check_packed_sequences(tokens.shape[0], position_ids)
        if self.config.experts is not None and self.config.experts.shared_gate:
            check_packed_sequences(tokens.shape[0], position_ids)
            _mask = make_sliding_mask(*tokens.shape)  # Qwen2-MoE makes one, whether a layer slides or not
        hidden = embeddings
        rotation: Any = self.rotary_emb(hidden, position_ids)
        cos, sin = rotation
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, position_ids)
        return self.norm(hidden)
