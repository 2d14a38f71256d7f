"""Facts about experts and latent attention, and how many tokens each expert of a rank works on.

Letters: E experts, k experts per token, T tokens of a rank. Balanced, each expert gets T k / E tokens of every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, comb
from typing import Literal

Groups = tuple[tuple[int, int], ...]
"""Experts of a rank as (how many, tokens of each)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture of experts that takes the place of an MLP."""

    count: int
    """Routed experts of a layer."""
    top_k: int
    """Experts that work on a token."""
    ffn_hidden: int
    """Width inside one routed expert."""
    shared_ffn_hidden: int = 0
    """Width inside the expert that every token passes, all shared ones together; 0: none."""
    shared_gate: bool = False
    """A learned gate scales the shared expert's result (Qwen2-MoE)."""
    dense_layers: int = 0
    """The first so many layers have a plain MLP (DeepSeek)."""
    every: int = 1
    """Of every so many layers the last has experts, the others a plain MLP (Llama 4)."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of logits."""
    scores_first: bool = False
    """Scores over all experts before the best are chosen; else softmax over the chosen ones alone."""
    scaling: float | None = None
    """Factor on the weights of the chosen experts."""
    groups: int = 1
    """Groups of experts that are chosen from first (DeepSeek); 1: no groups."""
    groups_top: int = 1
    """Groups that remain for a token."""
    selection_bias: bool = False
    """A bias, moved without gradients, is added to scores for the choice only (DeepSeek-V3)."""
    sinkhorn: bool = False
    """megatron: Sinkhorn's iteration balances the choice; scores are sigmoids for one expert per token, else softmax."""
    auxiliary_loss: bool = False
    """A loss on the balance of the choice."""
    router_dtype: Literal["fp32", "compute"] = "fp32"
    """Dtype of the logits."""
    weights_dtype: Literal["fp32", "compute"] = "compute"
    """transformers: dtype in which experts' results are weighted (Mixtral: fp32)."""
    dispatcher: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """megatron: copies of tokens go to their experts' ranks, or every rank gets all tokens."""
    permute_fusion: bool = True
    """megatron: tokens are sorted by one kernel each way, else by selections written out (always with allgather)."""
    grouped: bool = True
    """megatron: the products of a rank's experts run together, else one expert after the other."""
    bias: bool = False
    """Biases in both linear layers of an expert (GPT-OSS). megatron: those of the second are added op by op."""
    clamped: bool = False
    """megatron: gate and value are clamped before the activation, op by op (GPT-OSS)."""
    imbalance: float = 1.0
    """Tokens of the busiest expert over the mean; rank 0 has this expert."""
    capacity_factor: float | None = None
    """An expert takes at most so many times the mean, what comes on top is dropped; None: nothing is."""

    def most_imbalance(self) -> float:
        """Every token goes to the busiest expert."""
        return self.count / self.top_k

    def shares(self) -> tuple[float, float]:
        """Tokens of the busiest expert and of any other, over the mean, after dropping."""
        others = (self.count - self.imbalance) / (self.count - 1) if self.count > 1 else 1.0
        limit = self.capacity_factor if self.capacity_factor is not None else float("inf")
        return min(self.imbalance, limit), min(others, limit)

    def sent(self, tokens: int) -> int:
        """Copies of a rank's tokens that reach experts: T k, less what is dropped."""
        busiest, other = self.shares()
        return min(tokens * self.top_k, ceil(tokens * self.top_k / self.count * (busiest + (self.count - 1) * other)))

    def sent_once(self, tokens: int, ranks: int) -> int:
        """Rows that a rank sends where a token goes once to each rank that has some of its experts: balanced and at random,
        a rank has none of them with the odds of drawing k from the other ranks' experts."""
        elsewhere = self.count - self.count // ranks
        reached = 1 - comb(elsewhere, self.top_k) / comb(self.count, self.top_k)
        return ceil(tokens * ranks * reached)

    def groups_of_rank(self, tokens: int, ranks: int) -> Groups:
        """The experts of the rank that has the busiest; the experts are spread over `ranks`, each with T tokens."""
        local, mean = self.count // ranks, tokens * ranks * self.top_k / self.count
        busiest, other = self.shares()
        if busiest == other:
            return _even(local, round(local * mean * other))
        first, rest = round(mean * busiest), round((local - 1) * mean * other)
        return ((1, first), *_even(local - 1, rest))


def _even(count: int, tokens: int) -> Groups:
    """Equal parts, as far as whole tokens go."""
    if not count:
        return ()
    each, more = divmod(tokens, count)
    return tuple(group for group in ((more, each + 1), (count - more, each)) if group[0])


def rows_of(groups: Groups) -> int:
    """Tokens of all experts."""
    return sum(count * tokens for count, tokens in groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): keys and values, and queries, pass through narrow projections.

    A head's query and key have head_dim (of the model) entries without positions and `rope_head_dim` rotated ones.
    """

    kv_rank: int
    """Width of the compressed keys and values."""
    q_rank: int = 0
    """Width of the compressed queries; 0: queries are projected at once."""
    rope_head_dim: int = 64
    """Entries of a head that carry positions; one key part serves all heads."""
    value_head_dim: int = 128
    """Entries of a head's value."""


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """`degree` ranks share a layer's experts; `tensor` ranks share each expert's matrices."""

    degree: int = 1
    tensor: int = 1
