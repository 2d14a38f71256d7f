"""Megatron's linear layers by Transformer Engine in 8 bit; a norm before one is part of it (TELayerNormColumnParallelLinear).

Which they are: qkv, proj, fc1 and fc2 of the layers, experts' too. Attention itself, router, embedding and head stay in
the compute dtype.
"""

from __future__ import annotations

from sim.model import functional as F
from sim.model import routing as R
from sim.model.calls import Tensor
from sim.model.config import Fp8, ModelConfig
from sim.model.module import Module, Parameter
from sim.model.shard.tensor import ColumnParallelLinear, RowParallelLinear, TensorParallel


def in_fp8(weight: Parameter, fp8: Fp8) -> None:
    """Products read this weight in 8 bit."""
    weight.in_fp8 = True
    weight.dtype = "fp8" if fp8.stored else None


class Fp8ColumnLinear(ColumnParallelLinear):
    """`norm`: runs on x before the product, in the same function; its parameters are this module's."""

    def __init__(
        self, inputs: int, outputs: int, parallel: TensorParallel, fp8: Fp8, bias: bool = True,
        skip_bias_add: bool = False, norm: Module | None = None,
    ) -> None:  # fmt: skip
        if norm is not None:
            self.layer_norm = norm
        super().__init__(inputs, outputs, parallel, bias, skip_bias_add)
        in_fp8(self.weight, fp8)

    def forward(self, x: Tensor) -> Tensor:
        norm, parallel = vars(self).get("layer_norm"), self.parallel
        given = vars(norm) if norm is not None else {}
        return F.fp8_linear(
            x, self.weight, self.bias if self.adds_bias else None, given.get("weight"), given.get("bias"),
            ("column", parallel.degree, parallel.splits_tokens),
        )  # fmt: skip


class Fp8RowLinear(RowParallelLinear):
    """The sum over the ranks is part of the function."""

    def __init__(self, inputs: int, outputs: int, parallel: TensorParallel, fp8: Fp8, bias: bool = True) -> None:
        super().__init__(inputs, outputs, parallel, bias)
        in_fp8(self.weight, fp8)

    def forward(self, x: Tensor) -> Tensor:
        parallel = ("row", self.parallel.degree, self.parallel.splits_tokens)
        return F.fp8_linear(x, self.weight, None, None, None, parallel)


class Fp8WholeLinear(Module):
    """A projection that every rank holds whole and applies to its own tokens."""

    def __init__(self, inputs: int, outputs: int, parallel: TensorParallel, fp8: Fp8) -> None:
        self.weight = Parameter(outputs, inputs)
        self.weight.partial = parallel.splits_tokens
        in_fp8(self.weight, fp8)

    def forward(self, x: Tensor) -> Tensor:
        return F.fp8_linear(x, self.weight, None, None, None, ("none", 1, False))


class Identity(Module):
    """Stands where a norm is part of the linear layer behind it."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def column_linear(
    config: ModelConfig, inputs: int, outputs: int, parallel: TensorParallel, bias: bool = True,
    skip_bias_add: bool = False, norm: Module | None = None,
) -> ColumnParallelLinear:  # fmt: skip
    """The column-parallel layer that the configuration asks for; `norm` only in 8 bit."""
    if config.fp8 is not None:
        return Fp8ColumnLinear(inputs, outputs, parallel, config.fp8, bias, skip_bias_add, norm)
    return ColumnParallelLinear(inputs, outputs, parallel, bias, skip_bias_add)


def row_linear(
    config: ModelConfig, inputs: int, outputs: int, parallel: TensorParallel, bias: bool = True
) -> RowParallelLinear:
    """The same, row-parallel."""
    if config.fp8 is not None:
        return Fp8RowLinear(inputs, outputs, parallel, config.fp8, bias)
    return RowParallelLinear(inputs, outputs, parallel, bias)


class GroupedLinear(Module):
    """A weight [out, in] for each of this rank's experts, and with `bias` a bias [out], left to the caller if
    `skip_bias_add`."""

    def __init__(self, inputs: int, outputs: int, count: int, bias: bool, skip_bias_add: bool) -> None:
        for number in range(count):
            setattr(self, f"weight{number}", _of_expert(outputs, inputs))
        for number in range(count if bias else 0):
            setattr(self, f"bias{number}", _of_expert(outputs))
        self.weights = tuple(getattr(self, f"weight{number}") for number in range(count))
        self.biases = tuple(getattr(self, f"bias{number}") for number in range(count if bias else 0))
        self.added = () if skip_bias_add else self.biases

    def forward(self, x: Tensor, groups: tuple[tuple[int, int], ...]) -> Tensor:
        return R.grouped_linear(x, self.weights, groups, self.added)


def _of_expert(*shape: int) -> Parameter:
    parameter = Parameter(*shape)
    parameter.of_expert = True
    return parameter


class Fp8GroupedLinear(GroupedLinear):
    """The same in 8 bit."""

    def __init__(self, inputs: int, outputs: int, count: int, bias: bool, skip_bias_add: bool, fp8: Fp8) -> None:
        super().__init__(inputs, outputs, count, bias, skip_bias_add)
        for weight in self.weights:
            in_fp8(weight, fp8)

    def forward(self, x: Tensor, groups: tuple[tuple[int, int], ...]) -> Tensor:
        return R.fp8_grouped_linear(x, self.weights, groups, self.added)
