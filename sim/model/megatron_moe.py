"""Megatron's expert layer, one rank of the expert-parallel group: router, exchange of tokens, grouped products.

Letters: T tokens of this rank ([S/t, B] of them with sequence parallelism), H hidden, E experts, k experts per token,
N token copies at this rank's experts, F width inside an expert. A rank holds E/ranks experts; with `tensor` ranks per
expert they gather each other's tokens first. Code: megatron-core 0.16, alltoall dispatcher, TEGroupedMLP.
"""

from __future__ import annotations

from typing import Any

from sim.model import functional as F
from sim.model import routing as R
from sim.model.calls import Tensor
from sim.model.config import ModelConfig
from sim.model.experts import ExpertParallel, Experts, Groups, rows_of
from sim.model.megatron_layer import Mlp
from sim.model.module import Buffer, Module, Parameter
from sim.model.shard.tensor import TensorParallel
from sim.model.transformer_engine import Fp8GroupedLinear


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


class Dispatcher:
    """MoEAlltoAllTokenDispatcher: how tokens get to their experts and back."""

    def __init__(self, experts: Experts, parallel: ExpertParallel) -> None:
        self.experts = experts
        self.parallel = parallel

    def groups(self, tokens: int) -> Groups:
        """This rank's experts, of T tokens on every rank."""
        groups = self.experts.groups_of_rank(tokens, self.parallel.degree)
        return tuple((count, rows * self.parallel.tensor) for count, rows in groups)

    def preprocess(self, x: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of tokens [T k, H] in the order of experts, their weights [T k], and the way back. Then the host waits
        for the tokens of every expert: dropless, it cannot go on without."""
        F.compute("sum", (self.experts.count,), "int64", chosen)
        counted = F.record_for_host()
        permuted = self._permuted(x, weights, chosen)
        F.wait_on_host(counted)
        return permuted

    def _permuted(self, x: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        e, rows = self.experts, self.experts.sent(x.shape[0])
        if e.permute_fusion:
            return R.permute(x, weights, chosen, rows)
        mask = chosen.transpose(0, 1).contiguous()
        numbers = F.compute("arange", (x.shape[0],), "int64")
        places = F.compute("masked_select", (rows,), "int64", mask)
        permuted = R.masked_select(weights.transpose(0, 1).contiguous(), mask, rows)
        out = R.index_select(x, places)
        del numbers
        return out, permuted, places

    def dispatch(self, x: Tensor, arrives: int) -> Tensor:
        return R.all_to_all(x, arrives // self.parallel.tensor, self.parallel.degree)

    def postprocess(self, x: Tensor) -> Tensor:
        """All tokens of the ranks that share an expert, sorted by expert."""
        p, e = self.parallel, self.experts
        if p.tensor > 1:
            x = R.gather_rows(x, p.tensor, "etp")
        return R.sort_chunks(x, e.permute_fusion) if e.count > p.degree else x

    def combine_preprocess(self, x: Tensor, dtype: str) -> Tensor:
        p, e = self.parallel, self.experts
        if e.count > p.degree:
            x = R.sort_chunks(x, e.permute_fusion)
        return R.scatter_rows(x.to(dtype), p.tensor, "etp").to(x.dtype) if p.tensor > 1 else x

    def combine_postprocess(self, x: Tensor, places: Tensor, tokens: int) -> Tensor:
        if self.experts.permute_fusion:
            return R.unpermute(x, places, tokens)
        return R.scatter_add(x, places, tokens)


class GroupedLinear(Module):
    """A weight [out, in] for each of this rank's experts."""

    def __init__(self, inputs: int, outputs: int, count: int) -> None:
        self.count = count
        for number in range(count):
            weight = Parameter(outputs, inputs)
            weight.of_expert = True
            setattr(self, f"weight{number}", weight)

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        weights = tuple(getattr(self, f"weight{number}") for number in range(self.count))
        return R.grouped_linear(x, weights, groups)


def grouped_linear(config: ModelConfig, inputs: int, outputs: int, count: int) -> Module:
    """The experts' linear layers, in 8 bit or not."""
    if config.fp8 is not None:
        return Fp8GroupedLinear(inputs, outputs, count, config.fp8)
    return GroupedLinear(inputs, outputs, count)


class WeightedSwiGlu(Module):
    """[N, 2 F], gate and value, times the tokens' weights [N, 1]: [N, F] in one kernel."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return R.weighted_swiglu(x, weights)


class GroupedMlp(Module):
    def __init__(self, config: ModelConfig, experts: Experts, parallel: ExpertParallel) -> None:
        count, width = experts.count // parallel.degree, experts.ffn_hidden // parallel.tensor
        self.linear_fc1 = grouped_linear(config, config.hidden, 2 * width, count)
        self.activation_func: Module = WeightedSwiGlu()
        self.linear_fc2 = grouped_linear(config, width, config.hidden, count)

    def forward(self, x: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        weights = weights.unsqueeze(1)
        hidden = self.linear_fc1(x, groups)
        active = self.activation_func(hidden, weights)
        return self.linear_fc2(active, groups)


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
        self.experts: Module = GroupedMlp(config, experts, expert_parallel)
        self.shared_experts: Module | None = None
        if experts.shared_ffn_hidden:
            self.shared_experts = SharedExperts(config, experts, parallel)
        self.dispatcher = Dispatcher(experts, expert_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """Locals live as in the imitated function: copies sent and received, until it returns."""
        dispatcher, shape = self.dispatcher, x.shape
        shared = self.shared_experts(x) if self.shared_experts is not None else None
        routed: Any = self.router(x)
        weights, chosen = routed
        del routed
        flat = x.view(-1, shape[-1])
        sent, permuted, places = dispatcher.preprocess(flat, weights, chosen)
        groups = dispatcher.groups(flat.shape[0])
        received = dispatcher.dispatch(sent, rows_of(groups))
        permuted = dispatcher.dispatch(permuted, rows_of(groups))
        out = self._expert_outputs(received, permuted, groups, weights.dtype)
        out = R.all_to_all(out, sent.shape[0], dispatcher.parallel.degree)
        out = dispatcher.combine_postprocess(out, places, flat.shape[0]).view(*shape)
        return out + shared if shared is not None else out

    def _expert_outputs(self, received: Tensor, weights: Tensor, groups: Groups, dtype: str) -> Tensor:
        inputs = self.dispatcher.postprocess(received)
        weights = self.dispatcher.postprocess(weights)
        outputs = self.experts(inputs, weights, groups)
        return self.dispatcher.combine_preprocess(outputs, dtype)
