"""How linear layers, attention and norms trace: products and attention run in libraries, norms are decomposed."""

from __future__ import annotations

from math import prod
from typing import Any, cast

from sim.runtime.compiled.elementwise import autocast_to, plain_view, reshape, to
from sim.runtime.compiled.graph import Extern, Value
from sim.runtime.compiled.trace import Gradients, Meta, NotCompilable, Tracer, rule
from sim.runtime.ops.flash import Flash, flash_backward
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


def product(t: Tracer, aten: str, inputs: tuple[Value, ...], m: int, n: int, k: int, stored: tuple[int, int]) -> Value:
    """A product of m x k and k x n, in a result of shape `stored`."""

    def run(tape: Tape, _: list[Tensor], out: Tensor | None) -> tuple[Tensor, ...]:
        assert out is not None
        return (tape.matmul_out(aten.replace(".", "::"), m, n, k, out.dtype, out=out),)

    return t.extern(aten, inputs, Extern(run, planned=True), Meta(stored, inputs[-1].dtype))[0]


@rule("linear")
def linear(t: Tracer, x: Value, weight: Value, bias: Value | None) -> Value:
    """F.linear on [..., in]: weight [out, in]."""
    return _linear(t, x, weight, bias, weight.shape[0])


@rule("conv1d_linear")
def conv1d_linear(t: Tracer, x: Value, weight: Value, bias: Value) -> Value:
    """transformers' Conv1D: weight [in, out]."""
    return _linear(t, x, weight, bias, weight.shape[1])


def _linear(t: Tracer, x: Value, weight: Value, bias: Value | None, n: int) -> Value:
    if t.autocast_dtype:
        bias, weight, x = (cast(Any, autocast_to(t, v, t.autocast_dtype)) for v in (bias, weight, x))
    k, rows = x.shape[-1], prod(x.shape[:-1])
    folded = reshape(t, x, (rows, k))
    given = (folded, weight) if bias is None else (bias, folded, weight)
    y = product(t, "aten.mm" if bias is None else "aten.addmm", given, rows, n, k, (rows, n))

    def backward(g: Value) -> Gradients:
        g = plain_view(t, g, (rows, n))
        dw = product(t, "aten.mm", (folded, g), k, n, rows, cast(Any, weight.shape)) if weight.requires_grad else None
        dx = product(t, "aten.mm", (weight, g), rows, k, n, (rows, k)) if folded.requires_grad else None
        if bias is None:
            return [dx, dw]
        return [t.reduction("aten.sum", g, bias.shape, column=True) if bias.requires_grad else None, dx, dw]

    t.record(y, given, lambda g: backward(g))
    return reshape(t, y, (*x.shape[:-1], n))


@rule("attention")
def attention(t: Tracer, q: Value, k: Value, v: Value, dropout_p: float, kernel: str, causal: bool = True) -> Value:
    """Flash attention, a library's kernel."""
    if t.autocast_dtype:
        v, k, q = (cast(Any, autocast_to(t, x, t.autocast_dtype)) for x in (v, k, q))
    if kernel == "math" or q.dtype == "fp32" or q.shape[-1] % 8:
        raise NotCompilable("attention other than flash")
    batch, heads, length, _ = q.shape
    like_q = t.pointwise("", q).strides if q.strides is not None else None

    def run(tape: Tape, inputs: list[Tensor], _: Tensor | None) -> tuple[Tensor, ...]:
        return Flash.forward(tape, inputs[0], inputs[1], inputs[2], dropout_p, causal)

    def run_backward(tape: Tape, inputs: list[Tensor], _: Tensor | None) -> tuple[Tensor, ...]:
        g, q_, k_, v_, out_ = inputs[:5]
        return flash_backward(tape, g, q_, k_, v_, out_, causal)

    metas = (
        Meta(q.shape, q.dtype, like_q),
        Meta((batch, heads, length), "fp32"),
        Meta((2,), "int64"),
        Meta((1,), "int64"),
    )
    out, *saved = t.extern(Flash.aten, (q, k, v), Extern(run), *metas)

    def backward(g: Value, *_: Any) -> Gradients:
        name = f"{Flash.aten}_backward"
        like = [Meta(x.shape, x.dtype, x.strides) for x in (q, k, v)]
        return t.extern(name, (g, q, k, v, out, *saved), Extern(run_backward), *like)

    t.record((out, *saved), (q, k, v), backward)
    return out


def _normalized(t: Tracer, x: Value, weight: Value, bias: Value | None, centred: bool) -> Value:
    """Statistics in fp32, then weight and bias; gradients of weight and bias are sums over rows."""
    f = t.convert(x, "fp32")
    rows = (*x.shape[:-1], 1)
    if centred:
        mean = t.reduction("aten.mean", f, rows)
        statistic = t.reduction("aten.var", f, rows)
    else:
        statistic = t.reduction("aten.mean", t.pointwise("aten.pow", f), rows)
    rstd = t.pointwise("aten.rsqrt", t.pointwise("aten.add", statistic))
    n = t.pointwise("aten.mul", t.pointwise("aten.sub", f, mean) if centred else f, rstd)
    y = t.pointwise("aten.mul", n, weight)
    if bias is not None:
        y = t.pointwise("aten.add", y, bias)
    y = t.convert(y, x.dtype)

    def backward(g: Value) -> Gradients:
        wide = t.convert(g, "fp32")
        scaled = t.pointwise("aten.mul", wide, weight)
        s = t.reduction("aten.sum", t.pointwise("aten.mul", scaled, n), rows)
        sums = [s, t.reduction("aten.sum", scaled, rows)] if centred else [s]
        dx = t.pointwise("aten.mul", t.pointwise("aten.sub", scaled, n, *sums), rstd)
        dw = t.reduction("aten.sum", t.pointwise("aten.mul", wide, n), weight.shape, column=True)
        db = t.reduction("aten.sum", wide, weight.shape, column=True)
        return [dx, dw if weight.requires_grad else None, db if bias is not None and bias.requires_grad else None]

    t.record(y, (x, weight, bias), backward)
    return y


@rule("rms_norm")
def rms_norm(t: Tracer, x: Value, weight: Value) -> Value:
    """Under autocast in fp32."""
    return _normalized(t, to(t, x, "fp32") if t.autocast_dtype else x, weight, None, centred=False)


@rule("layer_norm")
def layer_norm(t: Tracer, x: Value, weight: Value, bias: Value | None) -> Value:
    """Under autocast in fp32."""
    return _normalized(t, to(t, x, "fp32") if t.autocast_dtype else x, weight, bias, centred=True)
