"""Transformer Engine's linear layers in 8 bit: casts, three products, the ranks' collectives, and a norm in front.

Each is one autograd function written in Python. It saves its input in 8 bit, in the form that the weight's gradient
reads; with sequence parallelism tokens are gathered in 8 bit. Sources: see sim.runtime.fp8.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from sim.model.calls import Shape
from sim.model.experts import Groups
from sim.program.kernels import Gemm
from sim.runtime.autograd import Gradients, Node
from sim.runtime.fp8 import Cast, Fp8
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.ops.experts import bias_gradients
from sim.runtime.ops.norm import norm_weight_gradients
from sim.runtime.ops.tensor_parallel import GROUP, block, finish, some_tokens, start, whole_tokens
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor

Parallel = tuple[str, int, bool]
"""column, row or none; ranks; do they share tokens between layers (sequence parallelism)?"""


def state(tape: Tape) -> Fp8:
    assert tape.fp8 is not None, "8-bit layers without their state"
    return tape.fp8


def product(tape: Tape, name: str, m: int, n: int, k: int, dtype: str) -> Tensor:
    """[m, n] in the compute dtype, of two factors in 8 or 4 bit."""
    tape.te_workspace()
    out = tape.empty((m, n), dtype)
    tape.recorder.gemm(name, m, n, k, state(tape).dtype)
    return out


def gather(tape: Tape, local: Cast, ranks: int, rows: bool = True) -> Cast:
    """All ranks' tokens [S, ...] of [S/ranks, ...], in 8 bit; compute waits."""
    whole = _room(tape, local, ranks, rows)
    block(tape, "all_gather", whole.data, ranks)
    if state(tape).in_blocks:
        block(tape, "all_gather", whole.scales, ranks)
    return whole


def _start_gather(tape: Tape, whole: Cast, ranks: int) -> int:
    """The same beside compute, up to the returned event."""
    gathered = start(tape, "all_gather", whole.data, ranks)
    return start(tape, "all_gather", whole.scales, ranks) if state(tape).in_blocks else gathered


def _room(tape: Tape, local: Cast, ranks: int, rows: bool) -> Cast:
    return state(tape).empty(whole_tokens(local.data.shape, ranks), rows)


class Fp8Linear(Op):
    """x [..., in] times weight [out, in] transposed. Inputs: x, weight, bias, weight and bias of a norm before it (None:
    there is none). Saves x in 8 bit (with a norm also x itself and its statistics) and the weight; beside a frozen weight
    x in 8 bit is not kept.

    Outputs: the product; then what is saved: x in 8 bit, its scales, mean (LayerNorm), reciprocal deviation.
    """

    node = "_LinearBackward"
    saves_late = True
    saved_outputs = (1, 2, 3, 4)
    not_differentiable = (1, 2, 3, 4)

    @staticmethod
    def saved_inputs(
        node: Node, x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None
    ) -> Iterable[Tensor | None]:
        return (weight, x if gamma is not None else None, gamma)

    @staticmethod
    def forward(
        tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None,
        parallel: Parallel,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        fp8, (kind, ranks, shares), (n, k) = state(tape), parallel, weight.shape
        gathers = kind == "column" and shares
        mean = tape.empty((prod(x.shape[:-1]) if beta is not None else 0,), "fp32")
        deviation = tape.empty((prod(x.shape[:-1]) if gamma is not None else 0,), "fp32")
        agree = (GROUP, ranks) if gathers else None
        trained = tape.grad_enabled and weight.requires_grad
        rows, columns = _input(tape, x, gamma is not None, agree, trained, gathers)
        fp8.refresh(weight)
        whole = gather(tape, rows, ranks) if gathers else rows
        tokens = whole.data.shape[:-1]
        out = product(tape, "te_gemm_fprop", prod(tokens), n, k, x.dtype)
        del whole
        saved = columns if columns is not None else rows if weight.requires_grad else fp8.nothing()
        del rows, columns
        out = _reduced(tape, _seen_as(out, (*tokens, n)), kind, ranks, shares)
        return out, saved.data, saved.scales, mean, deviation

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        weight, x, _, data, scales, mean, _ = saved
        fp8, ((kind, ranks, shares),), (n, k) = state(tape), node.attributes, weight.shape
        gradient, dtype = first(gradients), first(gradients).dtype
        trained = node.needs(1)
        gathers = trained and kind == "column" and shares
        g_rows, g_columns = gradient_casts(tape, gradient, kind == "row" and shares, ranks, trained)
        tokens = g_rows.data.shape[:-1]
        rows, result = prod(tokens), list[Tensor | None]([None] * 5)
        factor, gathered = Cast(data, scales), None
        if gathers:
            factor = _room(tape, factor, ranks, not fp8.in_blocks)
            gathered = _start_gather(tape, factor, ranks)
        turned = fp8.turned(weight)
        dx = _seen_as(product(tape, "te_gemm_dgrad", rows, k, n, dtype), (*tokens, k))
        del turned, g_rows
        if gathered is not None:
            finish(tape, gathered)
            factor = Cast(fp8.transposed(factor.data), factor.scales) if fp8.transposes else factor
        reduced = None
        if kind == "column" and ranks > 1:
            whole = dx
            dx = tape.empty(some_tokens(dx.shape, ranks), dtype) if shares else dx
            reduced = start(tape, "reduce_scatter" if shares else "all_reduce", whole, ranks)
            del whole
        if trained:
            result[1] = _weight_gradient(tape, weight, rows, dtype)
            node.metas[1] = (weight.shape, dtype)  # of a weight that is stored in 8 bit too
        del factor, g_columns
        if node.needs(2):
            result[2] = tape.empty((n,), dtype)  # summed by the kernel that casts
        if reduced is not None:
            finish(tape, reduced)
        result[0] = dx
        if x is not None:
            result[0], result[3], result[4] = _norm_backward(tape, node, x, dx, mean.elements > 0)
        gradients.clear()
        return result


class Fp8NormLinear(Fp8Linear):
    """The same with a norm in front."""

    node = "_LayerNormLinearBackward"


def _input(
    tape: Tape, x: Tensor, normed: bool, agree: tuple[str, int] | None, trained: bool, gathers: bool
) -> tuple[Cast, Cast | None]:
    """x in 8 bit along rows, and if the weight is `trained` in the form for its gradient; of tokens that are gathered
    that is made when it is needed.

    A norm writes 8 bit itself where the scale is known; else it writes x's dtype, and finds the amax on the way.
    The second form of tokens that are gathered is the rank's own where blocks share scales.
    """
    fp8, recorder, both = state(tape), tape.recorder, trained and not gathers
    if normed and fp8.recipe == "delayed":
        rows = fp8.empty(x.shape)
        recorder.memory_bound("norm_cast", "persistent_norm_forward", x.bytes + rows.data.bytes)
        return rows, Cast(fp8.transposed(rows.data), rows.scales) if fp8.transposes and both else None
    source = tape.pointwise("norm", x.shape, x.dtype, None, x.bytes, "persistent_norm_forward") if normed else x
    own = fp8.in_blocks and trained
    made, columns = fp8.cast(source, True, both or own, agree, amax_known=normed)
    assert made is not None
    return made, columns if fp8.two_forms else None


def gradient_casts(tape: Tape, gradient: Tensor, gathers: bool, ranks: int, trained: bool = True) -> tuple[Cast, Cast]:
    """The output's gradient in both forms, of all tokens; beside a frozen weight along rows alone."""
    fp8 = state(tape)
    if not trained:
        alone = fp8.cast(gradient, True, False, (GROUP, ranks) if gathers else None)[0]
        assert alone is not None
        return gather(tape, alone, ranks) if gathers else alone, fp8.nothing()
    if not gathers or fp8.in_blocks:
        rows, columns = fp8.both_forms(gradient)
        return (gather(tape, rows, ranks), gather(tape, columns, ranks, rows=False)) if gathers else (rows, columns)
    local = fp8.cast(gradient, True, False, (GROUP, ranks))[0]
    assert local is not None
    rows = gather(tape, local, ranks)
    del local
    return rows, Cast(fp8.transposed(rows.data), rows.scales) if fp8.transposes else rows


def _weight_gradient(tape: Tape, weight: Tensor, rows: int, dtype: str) -> Tensor | None:
    """Added to the main gradient by the product itself where that is fused."""
    n, k = weight.shape
    if tape.main_gradients is not None and tape.main_gradients.takes(weight):
        tape.recorder.launch("te_gemm_wgrad", Gemm(n, k, rows, state(tape).dtype, accumulate=True))
        return None
    return product(tape, "te_gemm_wgrad", n, k, rows, dtype)


def _norm_backward(tape: Tape, node: Node, x: Tensor, dy: Tensor, centred: bool) -> tuple[Tensor | None, ...]:
    """dx, and the gradients of the norm's weight and bias."""
    dx = tape.empty(x.shape, x.dtype)
    tape.recorder.memory_bound("norm_backward", "persistent_norm_backward", dy.bytes + x.bytes + dx.bytes)
    wanted = [node.needs(3), centred and node.needs(4)]
    width, dtype = x.shape[-1], node.metas[3][1]
    made = iter(norm_weight_gradients(tape, prod(x.shape[:-1]), width, dtype, sum(wanted)))
    return dx, *(next(made) if needed else None for needed in wanted)


def _seen_as(x: Tensor, shape: Shape) -> Tensor:
    return Tensor(x.storage, shape, x.dtype)


def _reduced(tape: Tape, out: Tensor, kind: str, ranks: int, shares: bool) -> Tensor:
    """A row-parallel layer's result: the sum over the ranks, or each rank's tokens of it."""
    if kind != "row" or ranks == 1:
        return out
    if not shares:
        block(tape, "all_reduce", out, ranks)
        return out
    part = tape.empty(some_tokens(out.shape, ranks), out.dtype)
    block(tape, "reduce_scatter", out, ranks)
    return part


class Fp8GroupedLinear(Op):
    """_GroupedLinear: x [N, in] times each expert's weight [out, in], and its bias. Saves x in 8 bit and the weights.

    Outputs: the product; x in 8 bit; its scales. Rows of an expert are taken to be multiples of 16 (32 for mxfp8).
    """

    node = "_GroupedLinearBackward"
    saves_late = True
    saved_outputs = (1, 2)
    not_differentiable = (1, 2)

    @staticmethod
    def saved_inputs(node: Node, x: Tensor, *matrices: Tensor) -> Iterable[Tensor | None]:
        return [matrix for matrix in matrices if len(matrix.shape) == 2]

    @staticmethod
    def forward(tape: Tape, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        *matrices, groups = arguments
        weights = [matrix for matrix in matrices if len(matrix.shape) == 2]
        fp8, (n, k) = state(tape), weights[0].shape
        rows, columns = fp8.cast(x, True, tape.grad_enabled)
        fp8.refresh(*weights)
        out = tape.empty((x.shape[0], n), x.dtype)
        _grouped(tape, "te_grouped_gemm", groups, n, k)
        assert rows is not None
        saved = columns if columns is not None else rows
        return out, saved.data, saved.scales

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        weights, (groups,), fp8 = saved[:-2], node.attributes, state(tape)
        (n, k), (shape, dtype), result = weights[0].shape, node.metas[0], list[Tensor | None]()
        cast = fp8.both_forms(first(gradients))
        result.append(tape.empty(shape, dtype) if node.needs(0) else None)
        if node.needs(0):
            turned = [fp8.turned(weight) for weight in weights]
            _grouped(tape, "te_grouped_gemm_dgrad", groups, k, n)
            del turned
        fused = tape.main_gradients is not None and tape.main_gradients.takes(weights[0])
        trained = [node.needs(1 + number) for number in range(len(weights))]
        result += [tape.empty((n, k), dtype) if needs and not fused else None for needs in trained]
        for count, rows in groups if any(trained) else ():
            if rows:
                work = Gemm(n, k, rows, fp8.dtype, count, accumulate=fused, grouped=True)
                tape.recorder.launch("te_grouped_gemm_wgrad", work)
        node.metas[1 : 1 + len(weights)] = [((n, k), dtype) for _ in weights]
        del cast
        gradients.clear()
        return result + bias_gradients(tape, node, 1 + len(weights), n, dtype)


def _grouped(tape: Tape, name: str, groups: Groups, n: int, k: int) -> None:
    tape.stream_workspaces()
    for count, rows in groups:
        if rows:
            tape.recorder.launch(name, Gemm(rows, n, k, state(tape).dtype, count, grouped=True))


class ScalesUpdate(Op):
    """Around all layers under delayed scaling: in backward, behind the first layer, scales of gradients are updated."""

    node = "UpdateScalesBackward"

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        state(tape).update_scales(backward=True)
        return [gradients[0]]


@rule("fp8_linear")
def fp8_linear(
    tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None,
    parallel: Parallel,
) -> Tensor:  # fmt: skip
    op = Fp8Linear if gamma is None else Fp8NormLinear
    return tape.apply_tuple(op, (x, weight, bias, gamma, beta), parallel)[0]


@rule("fp8_grouped_linear")
def fp8_grouped_linear(
    tape: Tape, x: Tensor, weights: tuple[Tensor, ...], groups: Groups, biases: tuple[Tensor, ...]
) -> Tensor:
    return tape.apply_tuple(Fp8GroupedLinear, (x, *weights, *biases), groups)[0]


@rule("fp8_layers_begin")
def fp8_layers_begin(tape: Tape, x: Tensor) -> Tensor:
    return tape.apply(ScalesUpdate, (x,)) if state(tape).recipe == "delayed" else x


@rule("fp8_layers_end")
def fp8_layers_end(tape: Tape, x: Tensor) -> Tensor:
    """The same for forward's scales, where the outermost autocast ends; not when layers are recomputed."""
    if state(tape).recipe == "delayed" and not tape.engine_running:
        state(tape).update_scales(backward=False)
    return x
