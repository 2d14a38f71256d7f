"""Tensor and sequence parallelism as Megatron splits a transformer (Shoeybi et al. 2019, Korthikanti et al. 2022).

A matrix is split by columns (its outputs) or rows (its inputs). A column-parallel layer followed by a row-parallel one
needs one all-reduce forward, behind the second, and one backward, before the first. With sequence parallelism what lies
between such pairs (norms, dropouts, residuals) works on S/t tokens, and each all-reduce becomes a reduce-scatter and an
all-gather. Letters: t ranks of the group, S tokens, B sequences, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.model import functional as F
from sim.model.calls import Tensor
from sim.model.module import Module, Parameter


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """`degree` ranks share every layer's matrices; `sequence_parallel`: they share the tokens in between too.

    `async_all_reduce`: in backward the input's gradient is summed beside the product for the weight's. `asynchronous`:
    torchtitan's, products in pieces beside the gathers and sums of their pieces.
    """

    degree: int = 1
    sequence_parallel: bool = False
    async_all_reduce: bool = True
    asynchronous: bool = False

    @property
    def splits_tokens(self) -> bool:
        return self.sequence_parallel and self.degree > 1


class ColumnParallelLinear(Module):
    """x [S, B, in] (S/t tokens of it with sequence parallelism) times weight [out/t, in] transposed: [S, B, out/t].

    Forward: nothing, or all-gather of the tokens; backward: all-reduce (reduce-scatter) of the input's gradient beside
    the weight's. The bias is added inside, or left to the caller (`skip_bias_add`).
    """

    def __init__(
        self, inputs: int, outputs: int, parallel: TensorParallel, bias: bool = True, skip_bias_add: bool = False
    ) -> None:
        self.weight = Parameter(outputs // parallel.degree, inputs)
        if bias:
            self.bias = Parameter(outputs // parallel.degree)
        self.adds_bias = bias and not skip_bias_add
        self.parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.adds_bias else None
        parallel = self.parallel
        return F.parallel_linear(
            x, self.weight, bias, parallel.degree, parallel.sequence_parallel, parallel.async_all_reduce
        )


class RowParallelLinear(Module):
    """x [S, B, in/t] times weight [out, in/t] transposed, summed over the ranks: [S, B, out], or its S/t tokens.

    The bias, whole on every rank, is left to the caller.
    """

    def __init__(self, inputs: int, outputs: int, parallel: TensorParallel, bias: bool = True) -> None:
        self.weight = Parameter(outputs, inputs // parallel.degree)
        if bias:
            self.bias = Parameter(outputs)
            self.bias.partial = parallel.splits_tokens
        self.parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        x = F.parallel_linear(x, self.weight)
        if self.parallel.splits_tokens:
            return F.reduce_scatter_tokens(x, self.parallel.degree)
        return F.all_reduce(x, self.parallel.degree) if self.parallel.degree > 1 else x


class VocabParallelEmbedding(Module):
    """Rows of weight [V/t, H]; tokens of other ranks' rows give zeros, and the ranks' sum [B, S, H] is the embedding.

    `scatters`: with sequence parallelism a rank gets its tokens of the sum alone, [S/t, B, H].
    """

    def __init__(self, count: int, width: int, parallel: TensorParallel, scatters: bool = False) -> None:
        self.weight = Parameter(count // parallel.degree, width)
        self.parallel = parallel
        self.scatters = scatters and parallel.splits_tokens

    def forward(self, tokens: Tensor) -> Tensor:
        if self.parallel.degree == 1:
            return F.embedding(tokens, self.weight)
        x = F.embedding_of_shard(tokens, self.weight)
        if self.scatters:
            return F.reduce_scatter_tokens(x.transpose(0, 1).contiguous(), self.parallel.degree)
        return F.all_reduce(x, self.parallel.degree)


def norm_of_tokens(norm: Module, parallel: TensorParallel) -> Module:
    """A norm whose rank sees some of the tokens: its parameters' gradients are partial sums."""
    for parameter in norm.parameters():
        parameter.partial = parallel.splits_tokens
    return norm
