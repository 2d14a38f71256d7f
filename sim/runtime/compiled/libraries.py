"""How linear layers, attention and norms trace: products and attention run in libraries, norms are decomposed."""

from __future__ import annotations

from math import prod
from typing import Any
from typing import cast as typed

from sim.runtime.compiled.elementwise import add, autocast_to, plain_view, reshape, to
from sim.runtime.compiled.float8 import cast, in_8_bit, layout, scale
from sim.runtime.compiled.graph import Extern, Product, Value
from sim.runtime.compiled.trace import Gradients, Meta, NotCompilable, Tracer, rule
from sim.runtime.ops.flash import Flash, flash_backward
from sim.runtime.ops.ring_sdpa import RingFlash, ring_backward
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


def product(
    t: Tracer,
    aten: str,
    inputs: tuple[Value, ...],
    m: int,
    n: int,
    k: int,
    stored: tuple[int, ...],
    dtype: str = "",
    over_rows: bool = False,
    rows: Value | None = None,
) -> Value:
    """A product of m x k and k x n, in a result of shape `stored` (and `dtype`; default: the inputs'). `over_rows`: as
    Gemm's; `rows`: as of `Product`."""
    of_inputs = inputs[-1].dtype
    name = "aten::_scaled_mm" if of_inputs == "fp8" else aten.replace(".", "::")

    def run(tape: Tape, _: list[Tensor], out: Tensor | None) -> tuple[Tensor, ...]:
        return (tape.matmul_out(name, m, n, k, of_inputs, out=out, over_rows=over_rows),)

    what = Product(name, m, n, k, of_inputs, rows)
    return t.extern(aten, inputs, Extern(run, planned=True, product=what), Meta(stored, dtype or of_inputs))[0]


@rule("linear")
def linear(t: Tracer, x: Value, weight: Value, bias: Value | None) -> Value:
    """F.linear on [..., in]: weight [out, in]; in 8 bit where asked for and both sizes are multiples of 16."""
    n, k = weight.shape
    if t.float8 is None or n % 16 or k % 16:
        return _linear(t, x, weight, bias, n)
    if t.autocast_dtype:
        bias, weight, x = (typed(Any, autocast_to(t, v, t.autocast_dtype)) for v in (bias, weight, x))
    y = float8_product(t, reshape(t, x, (prod(x.shape[:-1]), k)), weight)
    y = reshape(t, y, (*x.shape[:-1], n))
    return y if bias is None else add(t, y, bias)


@rule("conv1d_linear")
def conv1d_linear(t: Tracer, x: Value, weight: Value, bias: Value) -> Value:
    """transformers' Conv1D: weight [in, out]."""
    return _linear(t, x, weight, bias, weight.shape[1])


def _linear(t: Tracer, x: Value, weight: Value, bias: Value | None, n: int) -> Value:
    if t.autocast_dtype:
        bias, weight, x = (typed(Any, autocast_to(t, v, t.autocast_dtype)) for v in (bias, weight, x))
    k, rows = x.shape[-1], prod(x.shape[:-1])
    folded = reshape(t, x, (rows, k))
    given = (folded, weight) if bias is None else (bias, folded, weight)
    y = product(t, "aten.mm" if bias is None else "aten.addmm", given, rows, n, k, (rows, n), rows=folded)

    def backward(g: Value) -> Gradients:
        g = plain_view(t, g, (rows, n))
        dw = None
        if weight.requires_grad:
            dw = product(t, "aten.mm", (folded, g), k, n, rows, weight.shape, over_rows=True)
        dx = product(t, "aten.mm", (weight, g), rows, k, n, (rows, k), rows=g) if folded.requires_grad else None
        if bias is None:
            return [dx, dw]
        return [t.reduction("aten.sum", g, bias.shape, column=True) if bias.requires_grad else None, dx, dw]

    t.record(y, given, lambda g: backward(g))
    return reshape(t, y, (*x.shape[:-1], n))


def float8_product(t: Tracer, x: Value, weight: Value) -> Value:
    """torchao's Float8Linear: x [rows, k] times weight [n, k] transposed, as three products of 8-bit numbers.

    Under checkpointing a policy sees aten.mm (of torchao's tensor class). With scales per row backward's products are
    cuBLAS's without scales, which knows none per row, and scaled afterwards (accumulated in fp32, for which the kernel
    with scales per row is slower; torchao's addmm_float8_unwrapped, since December 2024).
    """
    (rows, k), n = x.shape, weight.shape[0]
    dtype = t.scaled[x.storage][1] if x.storage in t.scaled else x.dtype
    weight_scale = None if weight.dtype == "fp8" else scale(t, weight, "row")

    def scaled(
        a: tuple[Value, Value], b: tuple[Value, Value | None], m: int, n: int, k: int, stored: Any, by_rows: bool = True
    ) -> Value:
        """`a`, `b`: a factor and its scale; None: it is in 8 bit already."""
        known = b[1] is None or b[0].dtype == "fp8"
        factors = in_8_bit(t, *a), layout(t, b[0]) if known or b[1] is None else cast(t, b[0], b[1])
        scales = [by for by in (a[1], b[1]) if by is not None]
        tokens = factors[0] if by_rows else None
        return product(t, "aten.mm", (*scales, *factors), m, n, k, stored, dtype, rows=tokens)

    def unscaled(
        a: tuple[Value, Value], b: tuple[Value, Value | None], m: int, n: int, k: int, stored: Any, by_rows: bool = True
    ) -> Value:
        y = scaled(a, b, m, n, k, stored, by_rows)
        if t.float8 != "rowwise" or b[1] is None:
            return y
        return t.pointwise("aten.mul", y, a[1], b[1])

    by_row = scale(t, x, "row")
    if weight_scale is None:
        tokens = in_8_bit(t, x, by_row)
        y = product(t, "aten.mm", (by_row, tokens, weight), rows, n, k, (rows, n), dtype, rows=tokens)
    else:
        y = scaled((x, by_row), (weight, weight_scale), rows, n, k, (rows, n))

    def backward(g: Value) -> Gradients:
        g = plain_view(t, g, (rows, n))
        dx = dw = None
        if x.requires_grad:
            rowwise = weight_scale is not None and t.float8 == "rowwise"
            by = scale(t, weight, "column") if rowwise else weight_scale
            dx = unscaled((g, scale(t, g, "row")), (weight, by), rows, k, n, (rows, k))
        if weight.requires_grad:
            by = scale(t, x, "column", again=True)
            dw = unscaled((g, scale(t, g, "column")), (x, by), k, n, rows, weight.shape, by_rows=False)
        return [dx, dw]

    t.record(y, (x, weight), lambda g: backward(g))
    return y


@rule("attention")
def attention(t: Tracer, q: Value, k: Value, v: Value, dropout_p: float, kernel: str, causal: bool = True) -> Value:
    """Flash attention, a library's kernel."""
    if t.autocast_dtype:
        v, k, q = (typed(Any, autocast_to(t, x, t.autocast_dtype)) for x in (v, k, q))
    if kernel == "math" or q.dtype == "fp32" or q.shape[-1] % 8:
        raise NotCompilable("attention other than flash")
    batch, heads, length, _ = q.shape
    like_q = t.pointwise("", q).strides if q.strides is not None else None

    def run(tape: Tape, inputs: list[Tensor], _: Tensor | None) -> tuple[Tensor, ...]:
        if tape.context is not None:
            shared = tape.context
            return RingFlash.forward(tape, inputs[0], inputs[1], inputs[2], dropout_p, shared.degree, shared.kind)
        return Flash.forward(tape, inputs[0], inputs[1], inputs[2], dropout_p, causal)

    def run_backward(tape: Tape, inputs: list[Tensor], _: Tensor | None) -> tuple[Tensor, ...]:
        g, q_, k_, v_, out_ = inputs[:5]
        if tape.context is not None:
            return ring_backward(tape, g, (q_, k_, v_), out_, tape.context.degree, tape.context.kind)
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
