"""A CPU's operators as PyTorch calls: operands that lie as an `Operator` says, and the call that works on them.

A rule's reads are those of its autograd node: the incoming gradient, then what was saved, in the order of unpacking.
Where a node runs an operator on each of several saved tensors, all of them are run, and count as so many launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from sim.program.kernels import Layout, Operator

if TYPE_CHECKING:
    from calibration.check.pool import Pool

aten = torch.ops.aten
DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "int64": torch.int64, "bool": torch.bool, "uint8": torch.uint8,
    "complex64": torch.complex64,
}  # fmt: skip
EPSILON = 1e-5
RATE, DECAY, MOMENTA = 1e-4, 0.01, (0.9, 0.999)
ADAMW_TENSORS = 4
"""Parameter, gradient and two moments."""
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"

Operands = list[torch.Tensor]
Run = Callable[[Operands], Any]


@dataclass(frozen=True, slots=True)
class Recipe:
    """`run` works on operands made by `layouts` of the reads (None: the reads themselves), finished by `prepare`;
    `calls`: how many launches one run stands for."""

    run: Callable[[Operator], Run]
    layouts: Callable[[Operator], Sequence[Layout]] | None = None
    prepare: Callable[[Operands], Operands] | None = None
    calls: Callable[[Operator], int] = lambda _: 1


def operands(work: Operator, pool: Pool) -> Operands:
    """The next ones for a run of the operator."""
    recipe = recipe_of(work)
    made = pool.take(recipe.layouts(work) if recipe.layouts is not None else work.reads, _rows(work))
    return recipe.prepare(made) if recipe.prepare is not None else made


def _rows(work: Operator) -> int:
    """Below which indices stay: rows of a table, or classes."""
    tables = [one.shape for one in (*work.reads, work.out) if one is not None and len(one.shape) == 2]
    return min((shape[1] if "nll_loss" in work.name else shape[0] for shape in tables), default=2)


def recipe_of(work: Operator) -> Recipe:
    """Raises KeyError for an operator that is not known."""
    return RECIPES.get((work.name, work.node)) or RECIPES[work.name, ""]


def _each(function: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[Operator], Run]:
    """On the gradient and each saved tensor in turn."""

    def run(t: Operands) -> None:
        for saved in t[1:]:
            function(t[0], saved)

    return lambda _: run


def _sum(work: Operator) -> Run:
    assert work.out is not None
    shape = work.out.shape
    given = work.reads[0].shape
    lead = len(given) - len(shape)
    dims = [*range(lead), *(lead + i for i, n in enumerate(shape) if n == 1 and given[lead + i] != 1)]
    keeps = len(dims) > lead
    return lambda t: aten.sum.dim_IntList(t[0], dims, keeps)


def _flash(work: Operator) -> Run:
    causal = work.name.endswith("(causal)")
    return lambda t: aten._scaled_dot_product_flash_attention_for_cpu(t[0], t[1], t[2], 0.0, causal)


def _flash_backward(work: Operator) -> Run:
    causal = work.name.endswith("(causal)")

    def run(t: Operands) -> Any:
        g, k, q, v, lse, out = t
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(g, q, k, v, out, lse, 0.0, causal)

    return run


def _attended(t: Operands) -> Operands:
    """Gradient, k, q, v as they are; log-sum-exp and output as they come out of the forward."""
    g, k, q, v = t[:4]
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    return [g, k, q, v, lse, out]


def _normalized(t: Operands) -> Operands:
    """Saved statistics that belong to x."""
    g, bias, x, weight = t[:4]
    _, mean, rstd = aten.native_layer_norm(x, [x.shape[-1]], weight, bias, EPSILON)
    return [g, bias, x, weight, mean, rstd]


def _layer_norm_backward(_: Operator) -> Run:
    def run(t: Operands) -> Any:
        g, bias, x, weight, mean, rstd = t
        return aten.native_layer_norm_backward(g, x, [x.shape[-1]], mean, rstd, weight, bias, [True, True, True])

    return run


def _addmm_layouts(work: Operator) -> Sequence[Layout]:
    x, weight = work.reads
    return (Layout((weight.shape[-1],), x.dtype), x, weight)


def _nll(backward: bool) -> Callable[[Operator], Run]:
    def forward_run(t: Operands) -> Any:
        return aten.nll_loss_forward(t[0], t[1], None, 1, -100)

    def backward_run(t: Operands) -> Any:
        return aten.nll_loss_backward(t[0], t[1], t[2], None, 1, -100, t[3])

    return lambda _: backward_run if backward else forward_run


def _embedding_backward(work: Operator) -> Run:
    assert work.out is not None
    rows = work.out.shape[0]
    return lambda t: aten.embedding_dense_backward(t[0], t[1], rows, -1, False)


def _adamw_layouts(work: Operator) -> Sequence[Layout]:
    return [layout for layout in work.reads for _ in range(ADAMW_TENSORS)]


def _adamw(work: Operator) -> Run:
    steps = [torch.ones(()) for _ in work.reads]

    def run(t: Operands) -> None:
        groups = [t[i::ADAMW_TENSORS] for i in range(ADAMW_TENSORS)]
        torch._fused_adamw_(
            *groups, [], steps, lr=RATE, beta1=MOMENTA[0], beta2=MOMENTA[1], weight_decay=DECAY, eps=EPSILON,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    return run


def _filled(work: Operator) -> Sequence[Layout]:
    return (work.out or Layout((max(work.bytes // 4, 1),), "fp32"),)


def _plain_copy(work: Operator) -> Run:
    return lambda t: t[0].clone(memory_format=torch.contiguous_format)


def _mean_backward(work: Operator) -> Run:
    assert work.out is not None
    shape, count = work.out.shape, prod(work.out.shape) // max(prod(work.reads[0].shape), 1)
    return lambda t: torch.div(t[0].expand(shape), count)


RECIPES: dict[tuple[str, str], Recipe] = {
    ("aten::embedding", ""): Recipe(lambda _: lambda t: aten.embedding(t[0], t[1])),
    ("aten::embedding_dense_backward", "EmbeddingBackward0"): Recipe(_embedding_backward),
    ("aten::add", ""): Recipe(lambda _: lambda t: torch.add(t[0], t[1] if len(t) > 1 else EPSILON)),
    ("aten::add_", ""): Recipe(lambda _: lambda t: t[0].add_(t[1] if len(t) > 1 else EPSILON)),
    ("aten::mul", ""): Recipe(lambda _: lambda t: torch.mul(t[0], t[1])),
    ("aten::mul", "MulBackward0"): Recipe(_each(torch.mul), calls=lambda work: max(len(work.reads) - 1, 1)),
    ("aten::conj", "MulBackward0"): Recipe(lambda _: lambda t: torch.conj(t[1]).resolve_conj()),
    ("aten::div", "MeanBackward1"): Recipe(_mean_backward),
    ("aten::neg", ""): Recipe(lambda _: lambda t: torch.neg(t[0])),
    ("aten::pow", ""): Recipe(lambda _: lambda t: torch.pow(t[0], 2)),
    ("aten::pow", "PowBackward0"): Recipe(lambda _: lambda t: torch.pow(t[1], 1)),
    ("aten::mul", "PowBackward0"): Recipe(lambda _: lambda t: torch.mul(t[0], torch.mul(t[1], 2.0)), calls=lambda _: 2),
    ("aten::mean", ""): Recipe(lambda _: lambda t: torch.mean(t[0], [-1], keepdim=True)),
    ("aten::rsqrt", ""): Recipe(lambda _: lambda t: torch.rsqrt(t[0])),
    ("aten::pow", "RsqrtBackward0"): Recipe(lambda _: lambda t: torch.pow(t[1], 3)),
    ("aten::mul", "RsqrtBackward0"): Recipe(
        lambda _: lambda t: torch.mul(t[0], torch.mul(t[1], -0.5)), calls=lambda _: 2
    ),
    ("aten::gelu", ""): Recipe(lambda _: lambda t: aten.gelu(t[0], approximate="tanh")),
    ("aten::gelu_backward", "GeluBackward0"): Recipe(
        lambda _: lambda t: aten.gelu_backward(t[0], t[1], approximate="tanh")
    ),
    ("aten::silu", ""): Recipe(lambda _: lambda t: aten.silu(t[0])),
    ("aten::silu_backward", "SiluBackward0"): Recipe(lambda _: lambda t: aten.silu_backward(t[0], t[1])),
    ("aten::native_layer_norm", ""): Recipe(
        lambda _: lambda t: aten.native_layer_norm(t[0], [t[0].shape[-1]], t[1], t[2], EPSILON)
    ),
    ("aten::native_layer_norm_backward", "NativeLayerNormBackward0"): Recipe(_layer_norm_backward, prepare=_normalized),
    ("aten::addmm", ""): Recipe(lambda _: lambda t: torch.addmm(t[0], t[1], t[2]), _addmm_layouts),
    ("aten::mm", ""): Recipe(lambda _: lambda t: torch.mm(t[0], t[1])),
    ("aten::bmm", ""): Recipe(lambda _: lambda t: torch.bmm(t[0], t[1])),
    (f"{FLASH} (causal)", ""): Recipe(_flash),
    (f"{FLASH}_backward (causal)", ""): Recipe(_flash_backward, prepare=_attended),
    ("aten::copy_", ""): Recipe(_plain_copy),
    ("aten::cat", ""): Recipe(lambda _: lambda t: torch.cat(t, -1)),
    ("aten::sum", ""): Recipe(_sum),
    ("aten::_log_softmax", ""): Recipe(lambda _: lambda t: aten._log_softmax(t[0], -1, False)),
    ("aten::_log_softmax_backward_data", ""): Recipe(
        lambda _: lambda t: aten._log_softmax_backward_data(t[0], t[1], -1, torch.float32)
    ),
    ("aten::nll_loss_forward", ""): Recipe(_nll(backward=False)),
    ("aten::nll_loss_backward", ""): Recipe(_nll(backward=True)),
    ("aten::ones_like", ""): Recipe(lambda _: lambda t: torch.ones_like(t[0]), _filled),
    ("aten::zeros_like", ""): Recipe(lambda _: lambda t: torch.zeros_like(t[0]), _filled),
    ("aten::_fused_adamw_", ""): Recipe(_adamw, _adamw_layouts),
}
"""By the operator's name and, where its backward form differs, the node."""
