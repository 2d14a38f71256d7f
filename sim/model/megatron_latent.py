"""Multi-head latent attention as Megatron writes it, one rank of t (DeepSeek-V2, -V3, Moonlight).

Letters: S tokens ([S/t] of them between layers with sequence parallelism), B sequences, H hidden, A heads, D a head's
entries without positions, R with positions, V a head's value. Queries, and keys with values, come out of narrow
projections that every rank holds whole; what follows is split by heads. Code: megatron-core 0.16 with Transformer Engine;
rotary positions are one kernel here where that version writes them out.
"""

from __future__ import annotations

from sim.model import functional as F
from sim.model import routing as R
from sim.model.calls import Tensor
from sim.model.config import ModelConfig
from sim.model.experts import LatentAttention
from sim.model.megatron_layer import make_norm
from sim.model.module import Module, Parameter
from sim.model.shard.context import ContextParallel
from sim.model.shard.tensor import ColumnParallelLinear, TensorParallel
from sim.model.transformer_engine import Fp8ColumnLinear, Fp8WholeLinear, column_linear, row_linear


class DuplicatedLinear(Module):
    """A projection that every rank holds whole and applies to its own tokens."""

    def __init__(self, inputs: int, outputs: int, parallel: TensorParallel) -> None:
        self.weight = Parameter(outputs, inputs)
        self.weight.partial = parallel.splits_tokens

    def forward(self, x: Tensor) -> Tensor:
        return F.parallel_linear(x, self.weight)


class UpProjection(Module):
    """RMSNorm of the compressed tokens and a column-parallel product (TELayerNormColumnParallelLinear)."""

    def __init__(self, config: ModelConfig, inputs: int, outputs: int, parallel: TensorParallel) -> None:
        self.layer_norm = make_norm(config, parallel, inputs)
        self.linear = ColumnParallelLinear(inputs, outputs, parallel, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.layer_norm(x))


def down_projection(config: ModelConfig, outputs: int, parallel: TensorParallel) -> Module:
    """Of whole tokens to `outputs` compressed entries."""
    if config.fp8 is not None:
        return Fp8WholeLinear(config.hidden, outputs, parallel, config.fp8)
    return DuplicatedLinear(config.hidden, outputs, parallel)


def up_projection(config: ModelConfig, inputs: int, outputs: int, parallel: TensorParallel) -> Module:
    """Of `inputs` compressed entries, normalized."""
    if config.fp8 is not None:
        norm = make_norm(config, parallel, inputs)
        return Fp8ColumnLinear(inputs, outputs, parallel, config.fp8, bias=False, norm=norm)
    return UpProjection(config, inputs, outputs, parallel)


class LatentCoreAttention(Module):
    """q and k [S, B, A/t, D + R], v [S, B, A/t, V], each in plain order: [S, B, A/t * V]."""

    def __init__(self, context: ContextParallel) -> None:
        self.context = context

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s, b, a, _ = q.shape
        return F.fused_attention(q, k, v, self.context).view(s, b, a * v.shape[-1])


class LatentSelfAttention(Module):
    """`rope`: angles [S, 1, 1, R]."""

    def __init__(
        self, config: ModelConfig, latent: LatentAttention, parallel: TensorParallel, context: ContextParallel
    ) -> None:
        h, heads = config.hidden, config.heads
        self.latent = latent
        self.parallel = parallel
        self.heads, self.head_dim = heads // parallel.degree, config.head_dim
        self.core_attention: Module = LatentCoreAttention(context)
        self.linear_proj = row_linear(config, heads * latent.value_head_dim, h, parallel, bias=False)
        width = heads * (config.head_dim + latent.rope_head_dim)
        self.linear_q_proj: Module | None = None
        if latent.q_rank:
            self.linear_q_down_proj = down_projection(config, latent.q_rank, parallel)
            self.linear_q_up_proj = up_projection(config, latent.q_rank, width, parallel)
        else:
            self.linear_q_proj = column_linear(config, h, width, parallel, bias=False)
        self.linear_kv_down_proj = down_projection(config, latent.kv_rank + latent.rope_head_dim, parallel)
        width = heads * (config.head_dim + latent.value_head_dim)
        self.linear_kv_up_proj = up_projection(config, latent.kv_rank, width, parallel)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        q, k, v = self._queries_keys_values(x, rope)
        return self.linear_proj(self.core_attention(q, k, v))

    def _queries_keys_values(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        latent, d = self.latent, self.head_dim
        compressed = x if self.linear_q_proj is not None else self.linear_q_down_proj(x)
        combined = self.linear_kv_down_proj(x)
        compressed_kv, k_positions = combined.split((latent.kv_rank, latent.rope_head_dim))
        if self.parallel.splits_tokens:
            k_positions = R.gather_rows(k_positions, self.parallel.degree, "tp")
        q = self.linear_q_proj(compressed) if self.linear_q_proj is not None else self.linear_q_up_proj(compressed)
        s, b, _ = q.shape
        q = q.view(s, b, self.heads, d + latent.rope_head_dim)
        kv = self.linear_kv_up_proj(compressed_kv).view(s, b, self.heads, d + latent.value_head_dim)
        plain_q, q_positions = q.split((d, latent.rope_head_dim))
        plain_k, v = kv.split((d, latent.value_head_dim))
        q_positions = F.fused_rope(q_positions, rope)
        k_positions = F.fused_rope(k_positions.unsqueeze(2), rope)
        q = F.cat_last((plain_q, q_positions))
        k = F.cat_last((plain_k, k_positions.expand(s, b, self.heads, latent.rope_head_dim)))
        return q, k, v.contiguous()
