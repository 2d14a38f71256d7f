"""Llama as torchtitan writes it. B batch, S sequence, H hidden, A heads, K kv heads, D head dim, F ffn.

Pre-norm blocks with a SwiGLU; the RoPE cache is a buffer that every block receives.
"""

from __future__ import annotations

from typing import Any

from sim.model import functional as F
from sim.model.calls import Tensor
from sim.model.config import ModelConfig
from sim.model.language_model import Embedding, LanguageModel, Linear
from sim.model.module import Module, ModuleList, Parameter
from sim.model.shard.tensor import TensorParallel, norm_of_tokens


class FusedRMSNorm(Module):
    """F.rms_norm: one kernel."""

    def __init__(self, width: int) -> None:
        self.weight = Parameter(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight)


class ManualRMSNorm(Module):
    """torchtitan of 2024: x.float() normalized op by op, cast back, times weight."""

    def __init__(self, width: int) -> None:
        self.weight = Parameter(width)

    def forward(self, x: Tensor) -> Tensor:
        f = x.float()
        return F.scale_by((f * (f.square().mean_last() + 1e-5).rsqrt()).to(x.dtype), self.weight)


def make_norm(config: ModelConfig, width: int) -> Module:
    return FusedRMSNorm(width) if config.norm == "fused" else ManualRMSNorm(width)


def rope_complex(x: Tensor, cache: Tensor) -> Tensor:
    """x [B, S, A, D] rotated in complex fp32; cache [S, D/2] complex."""
    z = F.view_as_complex(x.float())
    c = cache.view(1, cache.shape[0], 1, cache.shape[1])
    return F.view_as_real(z * c).to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return F.cat_last((-x.narrow(-1, half, half), x.narrow(-1, 0, half)))


def rope_cos_sin(x: Tensor, cache: Tensor) -> Tensor:
    """x [B, S, A, D] rotated in fp32; cache [S, 2 D] holds cos and sin."""
    d = x.shape[-1]
    c = cache.view(1, x.shape[1], 1, 2 * d)
    f = x.float()
    rotated = rotate_half(f)
    return (f * c.narrow(-1, 0, d) + rotated * c.narrow(-1, d, d)).to(x.dtype)


def repeat_kv(x: Tensor, times: int) -> Tensor:
    """[B, S, K, D] to [B, S, K * times, D] by expand and reshape, which copies."""
    b, s, k, d = x.shape
    return x.unsqueeze(3).expand(b, s, k, times, d).reshape(b, s, k * times, d)


class TitanAttention(Module):
    """With t tensor-parallel ranks (parallelize_module): the rank's heads, on all tokens; x and the result are its own."""

    def __init__(self, config: ModelConfig, ranks: int = 1) -> None:
        h, d = config.hidden, config.head_dim
        self.config = config
        self.ranks = ranks
        self.wq = Linear(h, config.heads * d // ranks, config.qkv_bias)
        self.wk = Linear(h, config.kv_heads * d // ranks, config.qkv_bias)
        self.wv = Linear(h, config.kv_heads * d // ranks, config.qkv_bias)
        self.wo = Linear(config.heads * d // ranks, h)
        if config.qk_norm:
            self.q_norm, self.k_norm = make_norm(config, d), make_norm(config, d)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        x = F.gather_sequence(x, self.ranks)
        b, s, _ = x.shape
        c = self.config
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q = q.view(b, s, -1, c.head_dim)
        k = k.view(b, s, -1, c.head_dim)
        v = v.view(b, s, -1, c.head_dim)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        rotate = rope_complex if c.rope == "complex" else rope_cos_sin
        q, k = rotate(q, rope), rotate(k, rope)
        if c.gqa == "repeat" and c.kv_heads != c.heads:
            k, v = (repeat_kv(z, c.heads // c.kv_heads) for z in (k, v))
        kernel = "math" if c.attention == "math" else "sdpa"
        y = F.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), kernel=kernel)
        return F.scatter_sequence(self.wo(y.transpose(1, 2).contiguous().view(b, s, -1)), self.ranks)


class TitanFeedForward(Module):
    def __init__(self, config: ModelConfig, ranks: int = 1) -> None:
        h, f = config.hidden, config.ffn_hidden // ranks
        self.ranks = ranks
        self.w1, self.w2, self.w3 = Linear(h, f), Linear(f, h), Linear(h, f)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gather_sequence(x, self.ranks)
        return F.scatter_sequence(self.w2(F.silu(self.w1(x)) * self.w3(x)), self.ranks)


class SharedEmbedding(Embedding):
    """The rank's rows of the vocabulary; its tokens of the ranks' sum."""

    def __init__(self, count: int, width: int, ranks: int) -> None:
        super().__init__(count // ranks, width)
        self.ranks = ranks

    def forward(self, indices: Tensor) -> Tensor:
        return F.scatter_sequence(F.embedding_of_shard(indices, self.weight), self.ranks)


class TitanBlock(Module):
    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        self.attention = TitanAttention(config, parallel.degree)
        self.feed_forward = TitanFeedForward(config, parallel.degree)
        self.attention_norm = norm_of_tokens(make_norm(config, config.hidden), parallel)
        self.ffn_norm = norm_of_tokens(make_norm(config, config.hidden), parallel)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), rope)
        return h + self.feed_forward(self.ffn_norm(h))


class TitanLlama(LanguageModel):
    """`layers` may be replaced by wrappers; `run_layers` is how they are called (segments replace it)."""

    first_parts = ("tok_embeddings",)
    last_parts = ("norm", "output")
    tok_embeddings: Embedding | None
    norm: Module | None
    output: Linear | None
    returns_logits = True

    def __init__(self, config: ModelConfig, parallel: TensorParallel | None = None) -> None:
        super().__init__(config)
        parallel = parallel or TensorParallel()
        ranks = self.ranks = parallel.degree
        table = config.vocab, config.hidden
        embedding = self.tok_embeddings = SharedEmbedding(*table, ranks) if ranks > 1 else Embedding(*table)
        self.layers = ModuleList([TitanBlock(config, parallel) for _ in range(config.layers)])
        self.norm = norm_of_tokens(make_norm(config, config.hidden), parallel)
        output = self.output = Linear(config.hidden, config.vocab // ranks)
        if config.tied_embeddings:
            output.weight = embedding.weight
        self.name_paths()

    rope: Tensor

    def make_rope(self, seq_len: int) -> None:
        """The RoPE cache on the device, by the operators that make it."""
        self.rope = rope_cache(self.config, seq_len)

    def hidden_states(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers:
            h = layer(h, self.rope)
        return h if self.norm is None else self.norm(h)

    def project(self, hidden: Tensor) -> Tensor:
        assert self.output is not None
        logits = self.output(F.gather_sequence(hidden, self.ranks))
        return logits.float() if self.config.logits == "model_upcast" else logits

    def forward(self, tokens: Tensor) -> Any:
        h = self.hidden_states(tokens)
        return h if self.output is None else self.logits_of(h)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Under loss_parallel where the vocabulary is shared."""
        if self.ranks == 1:
            return super().loss(logits, targets)
        flat = logits.reshape(-1, logits.shape[-1])
        wide = flat.float() if self.config.logits == "loss_upcast" else flat
        return F.parallel_cross_entropy(wide, targets.reshape(-1), self.ranks)


def rope_cache(config: ModelConfig, seq_len: int) -> Tensor:
    """precompute_freqs_cis on the device: its temporaries die as Python rebinds them."""
    n, t = config.head_dim // 2, seq_len
    a: Any = F.empty((n,), "int64")  # arange
    f: Any = F.empty((n,), "fp32")  # .float()
    a = None
    e: Any = F.empty((n,), "fp32")  # / dim
    f = None
    p: Any = F.empty((n,), "fp32")  # theta ** e
    x: Any = F.empty((), "int64")  # theta as a scalar tensor
    x = None
    e = None
    r: Any = F.empty((n,), "fp32")  # reciprocal
    f = F.empty((n,), "fp32")  # * 1.0
    r = p = None
    positions: Any = F.empty((t,), "int64")
    outer: Any = F.empty((t, n), "fp32")
    positions = f = None
    ones: Any = F.empty((t, n), "fp32")
    polar = F.empty((t, n), "complex64")
    ones = outer = None
    del a, e, x, r, p, positions, f, ones, outer
    if config.rope == "complex":
        return polar
    return F.empty((t, 4 * n), "fp32")
