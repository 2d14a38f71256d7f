"""Experts as transformers 5.24 writes them for Mixtral, Qwen2-MoE and Qwen3-MoE, by grouped products (its default).

Letters: T tokens, H hidden, E experts, k experts per token, N = T k copies of tokens, F width inside an expert.
"""

from __future__ import annotations

from typing import Any

from sim.model import functional as F
from sim.model import routing as R
from sim.model.calls import Tensor
from sim.model.config import ModelConfig
from sim.model.experts import Experts
from sim.model.language_model import Linear
from sim.model.module import Module, Parameter


class TopKRouter(Module):
    """Logits [T, E], weights and numbers of the chosen experts [T, k]."""

    def __init__(self, config: ModelConfig, experts: Experts) -> None:
        self.experts = experts
        self.weight = Parameter(experts.count, config.hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        e = self.experts
        logits = F.linear(x, self.weight)
        scores = F.softmax(logits.float())
        weights, indices = R.top_k(scores, e.top_k)
        if not e.scores_first:
            weights = R.divide_in_place(weights, R.sum_over(weights, -1, keepdim=True))
        return logits, weights if e.weights_dtype == "fp32" else weights.to(logits.dtype), indices


class GroupedExperts(Module):
    """All experts' weights in two parameters; grouped_mm_experts_forward."""

    def __init__(self, config: ModelConfig, experts: Experts) -> None:
        self.experts = experts
        self.gate_up_proj = Parameter(experts.count, 2 * experts.ffn_hidden, config.hidden)
        self.down_proj = Parameter(experts.count, config.hidden, experts.ffn_hidden)

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Locals live to the end, as there."""
        e, (tokens, hidden) = self.experts, x.shape
        rows, groups = tokens * e.top_k, e.groups_of_rank(tokens, 1)
        sample_weights, ids = weights.reshape(-1), indices.reshape(-1)
        sorted_ids, order = R.sort(ids)
        selected = R.index_rows(x, F.compute("floor_divide", (rows,), "int64", order))
        sorted_weights = R.index_rows(sample_weights, order)
        numbers = F.compute("_to_copy", (rows,), "int32", sorted_ids)
        counts = F.compute("histc", (e.count,), "int32", numbers)
        offsets = F.cumsum(counts, "int32")
        out = R.grouped_mm(selected, self.gate_up_proj, offsets, groups)
        out = self._gated(out)
        out = R.grouped_mm(out, self.down_proj, offsets, groups)
        weighted = out * sorted_weights.unsqueeze(1)
        inverse = F.empty((rows,), "int64")
        F.compute("arange", (rows,), "int64")
        weighted = R.index_rows(weighted, inverse)
        result = R.sum_over(weighted.view(tokens, e.top_k, hidden), 1)
        return result.to(x.dtype)

    def _gated(self, x: Tensor) -> Tensor:
        gate, up = x.split(self.experts.ffn_hidden)
        return F.silu(gate) * up


class SharedExpert(Module):
    def __init__(self, config: ModelConfig, width: int) -> None:
        h = config.hidden
        self.gate_proj, self.up_proj, self.down_proj = Linear(h, width), Linear(h, width), Linear(width, h)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SparseMoeBlock(Module):
    """x [B, S, H] to the same shape. Qwen3's has its experts before its router, in the order of parameters."""

    def __init__(self, config: ModelConfig, experts: Experts) -> None:
        if config.qk_norm:
            self.experts = GroupedExperts(config, experts)
        self.gate = TopKRouter(config, experts)
        if not config.qk_norm:
            self.experts = GroupedExperts(config, experts)
        self.shared_expert: SharedExpert | None = None
        if experts.shared_ffn_hidden:
            self.shared_expert = SharedExpert(config, experts.shared_ffn_hidden)
            self.shared_expert_gate = Linear(config.hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        flat = x.view(-1, shape[-1])
        shared = self.shared_expert(flat) if self.shared_expert is not None else None
        routed: Any = self.gate(flat)
        _logits, weights, indices = routed
        del routed
        out = self.experts(flat, indices, weights)
        if shared is not None:
            shared = R.sigmoid(self.shared_expert_gate(flat)) * shared
            out = out + shared
        return out.reshape(*shape)
