"""Megatron's expert layer, one rank of the expert-parallel group: router, exchange of tokens, the experts' products.

Letters: T tokens of this rank ([S/t, B] of them with sequence parallelism), H hidden, E experts, k experts per token,
N token copies at this rank's experts, F width inside an expert. A rank holds E/ranks experts; with `tensor` ranks per
expert they gather each other's tokens first. Code: megatron-core 0.16; `megatron_dispatch` has the exchange.
"""

from __future__ import annotations

from typing import Any

from sim.model import functional as F
from sim.model import routing as R
from sim.model.calls import Tensor
from sim.model.config import ModelConfig
from sim.model.experts import ExpertParallel, Experts, Groups
from sim.model.megatron_dispatch import dispatcher_of
from sim.model.megatron_layer import Mlp, plain_activation
from sim.model.module import Buffer, Module, ModuleList, Parameter
from sim.model.shard.tensor import TensorParallel
from sim.model.transformer_engine import Fp8GroupedLinear, GroupedLinear

SINKHORN_ROUNDS = 2
"""Until its columns change by less than 1e-4: so many while logits are small (of deviation 0.1 and less), as in a fresh
model; 3 to 5 at a deviation of 1 (tried with 4 to 64 experts). An assumption, of time alone."""


class TopKRouter(Module):
    """Weights [T, E] of the chosen experts, zero elsewhere, and which are chosen, bool [T, E]."""

    def __init__(self, config: ModelConfig, experts: Experts, parallel: TensorParallel) -> None:
        self.experts = experts
        self.weight = Parameter(experts.count, config.hidden)
        self.weight.partial = parallel.splits_tokens
        if experts.selection_bias:
            self.local_tokens_per_expert = Buffer("fp32", experts.count)
            self.expert_bias = Buffer("fp32", experts.count)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        e = self.experts
        logits = R.router_logits(x, self.weight, "fp32" if e.router_dtype == "fp32" else None).view(-1, e.count)
        weights, chosen = self._routed(logits)
        if e.auxiliary_loss:
            weights = self._with_auxiliary_loss(weights, logits)
        if e.selection_bias:
            F.compute("sum", (e.count,), "int64", chosen)
        return weights, chosen

    def _routed(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        e = self.experts
        if e.sinkhorn:
            return self._by_sinkhorn(logits)
        if e.scores == "sigmoid":
            weights, indices = self._by_sigmoid(logits)
        elif e.scores_first:
            scores = F.softmax(logits, "fp32").to(logits.dtype)
            weights, indices = self._best(scores)
        else:
            scores, indices = self._best(logits)
            weights = F.softmax(scores, "fp32").to(logits.dtype)
        if e.scaling is not None:
            weights = weights * e.scaling
        return R.scatter(weights, indices, e.count), chosen_map(logits, indices)

    def _by_sinkhorn(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choices that Sinkhorn's iteration balances, without gradients; the host reads how far each round came."""
        e, tokens = self.experts, logits.shape[0]
        costs = F.compute("exp", logits.shape, "fp32", logits)
        for _ in range(SINKHORN_ROUNDS):
            by_token = F.compute("sum", (tokens,), "fp32", F.compute("mul", logits.shape, "fp32", costs))
            by_expert = F.compute("sum", (e.count,), "fp32", F.compute("mul", logits.shape, "fp32", costs, by_token))
            F.compute("mean", (), "fp32", by_expert)
            F.read_on_host()
        balanced = F.compute("mul", logits.shape, "fp32", costs, by_token)
        indices = F.compute("topk", (tokens, e.top_k), "int64", balanced)
        del balanced, by_token, by_expert, costs
        scores = R.sigmoid(logits) if e.top_k == 1 else F.softmax(logits, "fp32").to(logits.dtype)
        chosen = chosen_map(scores, indices)
        return scores * chosen, chosen

    def _by_sigmoid(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = R.sigmoid(logits.float()).to(logits.dtype)
        if self.experts.selection_bias:
            _, indices = self._best(scores + 0.0)  # the bias
            scores = R.gather(scores, indices)
        else:
            scores, indices = self._best(scores)
        if self.experts.top_k == 1:
            return scores, indices
        return R.divide(scores, R.sum_over(scores, -1, keepdim=True) + 1e-20), indices

    def _best(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The best k, of the best groups if there are some (group_limited_topk)."""
        e, tokens = self.experts, scores.shape[0]
        if e.groups == 1:
            return R.top_k(scores, e.top_k)
        in_groups = scores.view(tokens, e.groups, e.count // e.groups)
        group_scores = R.sum_over(R.top_k(in_groups, e.top_k // e.groups_top)[0], -1)
        _, best = R.top_k(group_scores, e.groups_top)
        mask = F.compute("scatter_", (tokens, e.groups), scores.dtype, best)
        mask = F.compute("_reshape_alias", (tokens, e.count), scores.dtype, mask)
        mask = F.compute("bitwise_not", (tokens, e.count), "bool", mask)
        return R.top_k(R.masked_fill(scores, mask), e.top_k)

    def _with_auxiliary_loss(self, weights: Tensor, logits: Tensor) -> Tensor:
        """The chosen experts' share of tokens times their mean score, over all scores anew."""
        e = self.experts
        if e.scores == "sigmoid":
            scores = R.sigmoid(logits)
            scores = R.divide(scores, R.sum_over(scores, -1, keepdim=True) + 1e-20)
        else:
            scores = F.softmax(logits, "fp32")
        _, indices = R.top_k(scores, e.top_k)
        tokens = F.compute("sum", (e.count,), "int64", chosen_map(logits, indices))
        loss = R.sum_over(R.sum_over(scores, 0) * tokens, 0) * 1.0
        return R.with_auxiliary_loss(weights, loss)


def chosen_map(logits: Tensor, indices: Tensor) -> Tensor:
    """zeros_like(logits).int().scatter(1, indices, 1).bool()."""
    chosen = F.compute("zeros_like", logits.shape, logits.dtype)
    chosen = F.compute("_to_copy", logits.shape, "int32", chosen)
    chosen = F.compute("scatter", logits.shape, "int32", chosen, indices)
    return F.compute("_to_copy", logits.shape, "bool", chosen)


def grouped_linear(config: ModelConfig, inputs: int, outputs: int, count: int, skip_bias_add: bool) -> GroupedLinear:
    """The experts' linear layers, in 8 bit or not."""
    bias = config.experts is not None and config.experts.bias
    if config.fp8 is not None:
        return Fp8GroupedLinear(inputs, outputs, count, bias, skip_bias_add, config.fp8)
    return GroupedLinear(inputs, outputs, count, bias, skip_bias_add)


class WeightedSwiGlu(Module):
    """[N, 2 F], gate and value, times the tokens' weights [N, 1]: [N, F] in one kernel."""

    def __init__(self, stores_fp8: bool) -> None:
        self.stores_fp8 = stores_fp8

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return F.stored_swiglu(x, weights) if self.stores_fp8 else R.weighted_swiglu(x, weights)


class ClampedSwiGlu(WeightedSwiGlu):
    """The same behind gate and value that are clamped apart and joined again (weighted_bias_quick_geglu_impl; its gate's
    kernel moves as much as SiLU's)."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        gate, value = x.split(x.shape[-1] // 2)
        joined = F.cat_last((R.clamp(gate), R.clamp(value)))
        return super().forward(joined, weights)


class WeightedPlain(Module):
    """An activation without a gate, [N, F], then times the tokens' weights [N, 1]."""

    def __init__(self, config: ModelConfig) -> None:
        self.activation = plain_activation(config)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        x = self.activation(x)
        dtype = x.dtype
        x = x * weights
        x = x.to(dtype)
        return x


class GroupedMlp(Module):
    """TEGroupedMLP: the products of all experts of a rank together."""

    def __init__(self, config: ModelConfig, experts: Experts, parallel: ExpertParallel, count: int) -> None:
        gated, width = config.activation == "silu", experts.ffn_hidden // parallel.tensor
        self.linear_fc1 = grouped_linear(config, config.hidden, 2 * width if gated else width, count, False)
        glu = ClampedSwiGlu if experts.clamped else WeightedSwiGlu
        self.activation_func: Module = glu(config.fp8_swiglu_input) if gated else WeightedPlain(config)
        second = grouped_linear(config, width, config.hidden, count, True)
        self.linear_fc2: Module = second
        self.biases = second.biases  # added here, whatever wraps the layer

    def forward(self, x: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        weights = weights.unsqueeze(1)
        hidden = self.linear_fc1(x, groups)
        active = self.activation_func(hidden, weights)
        out = self.linear_fc2(active, groups)
        return R.add_expert_biases(out, self.biases, weights, groups) if self.biases else out


class SequentialMlp(Module):
    """One expert after the other, each on its part of the rows; their results joined by a copy."""

    def __init__(self, config: ModelConfig, experts: Experts, parallel: ExpertParallel, count: int) -> None:
        self.local_experts = ModuleList([GroupedMlp(config, experts, parallel, 1) for _ in range(count)])

    def forward(self, x: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        each = tuple(rows for count, rows in groups for _ in range(count))
        if len(each) == 1:
            return self.local_experts[0](x, weights, groups)
        parts, scales = R.split_rows(x, each), R.split_rows(weights, each)
        outputs = []
        for expert, part, scale, rows in zip(self.local_experts, parts, scales, each):
            outputs.append(expert(part, scale, ((1, rows),)))
        return F.cat(tuple(outputs), 0)


def make_experts(config: ModelConfig, experts: Experts, parallel: ExpertParallel) -> Module:
    """A rank's experts, their products together or one after the other."""
    kind = GroupedMlp if experts.grouped else SequentialMlp
    return kind(config, experts, parallel, experts.count // parallel.degree)


class SharedExperts(Mlp):
    """The expert that every token passes, a tensor-parallel MLP; with a gate, its result is scaled per token."""

    def __init__(self, config: ModelConfig, experts: Experts, parallel: TensorParallel) -> None:
        super().__init__(config, parallel, experts.shared_ffn_hidden)
        self.gate_weight: Parameter | None = None
        if experts.shared_gate:
            self.gate_weight = Parameter(1, config.hidden)
            self.gate_weight.partial = parallel.splits_tokens

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.gate_weight is None:
            return out
        return out * R.sigmoid(F.linear(x, self.gate_weight))


class MoeLayer(Module):
    """x [S, B, H] (S/t tokens of it with sequence parallelism) to the same shape."""

    def __init__(
        self, config: ModelConfig, experts: Experts, parallel: TensorParallel, expert_parallel: ExpertParallel
    ) -> None:
        self.router = TopKRouter(config, experts, parallel)
        self.experts = make_experts(config, experts, expert_parallel)
        self.shared_experts: Module | None = None
        if experts.shared_ffn_hidden:
            self.shared_experts = SharedExperts(config, experts, parallel)
        self.dispatcher = dispatcher_of(experts, expert_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """Locals live as in the imitated function."""
        shape = x.shape
        shared = self.shared_experts(x) if self.shared_experts is not None else None
        routed: Any = self.router(x)
        weights, chosen = routed
        del routed
        out = self.dispatcher.through(x.view(-1, shape[-1]), weights, chosen, self.experts).view(*shape)
        return out + shared if shared is not None else out
