"""How elementwise operators, casts and views trace, and their gradients."""

from __future__ import annotations

from math import prod

from sim.model.calls import Shape
from sim.runtime import strides as st
from sim.runtime.compiled.graph import Extern, Value
from sim.runtime.compiled.trace import Gradients, Meta, NotCompilable, Tracer, rule
from sim.runtime.ops.pointwise import broadcast, promote
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


@rule("to")
def to(t: Tracer, x: Value, dtype: str) -> Value:
    if x.dtype == dtype:
        return x
    y = t.pointwise("aten._to_copy", x, dtype=dtype)
    t.record(y, (x,), lambda g: [g])
    return y


def autocast_to(t: Tracer, x: Value | None, dtype: str | None) -> Value | None:
    """Autocast's cast; parameters are cast once."""
    if x is None or dtype is None or x.dtype == dtype or x.dtype not in ("fp32", "bf16", "fp16"):
        return x
    if not x.parameter:
        return to(t, x, dtype)
    if (x, dtype) not in t.casts:
        t.casts[x, dtype] = to(t, x, dtype)
    return t.casts[x, dtype]


@rule("add")
def add(t: Tracer, a: Value, b: Value | float) -> Value:
    if not isinstance(b, Value):
        y = t.pointwise("aten.add", a)
        t.record(y, (a,), lambda g: [g])
        return y
    y = t.pointwise("aten.add", a, b, dtype=promote(a.dtype, b.dtype), shape=broadcast(a.shape, b.shape))
    t.record(y, (a, b), lambda g: [g, g])
    return y


@rule("mul")
def mul(t: Tracer, a: Value, b: Value | float) -> Value:
    if not isinstance(b, Value):
        y = t.pointwise("aten.mul", a)
        t.record(y, (a,), lambda g: [t.pointwise("aten.mul", g)])
        return y
    if "complex64" in (a.dtype, b.dtype):
        return _complex_product(t, a, b)
    y = t.pointwise("aten.mul", a, b, dtype=promote(a.dtype, b.dtype), shape=broadcast(a.shape, b.shape))

    def backward(g: Value) -> Gradients:
        da = t.pointwise("aten.mul", g, b) if a.requires_grad else None
        return [da, t.pointwise("aten.mul", g, a) if b.requires_grad else None]

    t.record(y, (a, b), backward)
    return y


def _complex_product(t: Tracer, a: Value, b: Value) -> Value:
    """Inductor generates no code for complex numbers: ATen's kernel runs. b needs no gradient (rotary factors)."""
    if b.requires_grad:
        raise NotCompilable("a complex product with two factors to differentiate")

    def run(tape: Tape, inputs: list[Tensor], _: Tensor | None) -> tuple[Tensor, ...]:
        x, y = inputs
        return (tape.pointwise("aten::mul", a.shape, "complex64", None, x.bytes + y.bytes),)

    def backward(g: Value) -> Gradients:
        if (b.storage, "conjugate") not in t.casts:
            conjugate = t.view(b, b.shape, b.strides)
            (copy,) = t.extern("aten.clone", (conjugate,), Extern(_clone), Meta(b.shape, "complex64"))
            t.casts[b.storage, "conjugate"] = copy
        factor = t.casts[b.storage, "conjugate"]
        return [t.extern("aten.mul", (g, factor), Extern(run), Meta(a.shape, "complex64"))[0], None]

    (y,) = t.extern("aten.mul", (a, b), Extern(run), Meta(a.shape, "complex64"))
    t.record(y, (a, b), backward)
    return y


def _clone(tape: Tape, inputs: list[Tensor], _: Tensor | None) -> tuple[Tensor, ...]:
    return (tape.copy(inputs[0]),)


def _unary(name: str, aten: str, reads_result: bool = False) -> None:
    """An operator whose gradient reads its input (or its result)."""

    def trace(t: Tracer, x: Value) -> Value:
        y = t.pointwise(aten, x)
        t.record(y, (x,), lambda g: [t.pointwise(f"{aten}_backward", g, y if reads_result else x)])
        return y

    rule(name)(trace)


def _unary_in_fp32(name: str, aten: str, reads_result: bool = False) -> None:
    """Operators on autocast's list of those that run in fp32."""

    def trace(t: Tracer, x: Value) -> Value:
        wide = to(t, x, "fp32") if t.autocast_dtype else x
        y = t.pointwise(aten, wide)
        t.record(y, (wide,), lambda g: [t.pointwise(f"{aten}_backward", g, y if reads_result else wide)])
        return y

    rule(name)(trace)


_unary("silu", "aten.silu")
_unary("gelu", "aten.gelu")
_unary("tanh", "aten.tanh", reads_result=True)
_unary_in_fp32("pow2", "aten.pow")
_unary_in_fp32("pow3", "aten.pow")
_unary_in_fp32("rsqrt", "aten.rsqrt", reads_result=True)


@rule("neg")
def neg(t: Tracer, x: Value) -> Value:
    y = t.pointwise("aten.neg", x)
    t.record(y, (x,), lambda g: [t.pointwise("aten.neg", g)])
    return y


@rule("mean_last")
def mean_last(t: Tracer, x: Value) -> Value:
    y = t.reduction("aten.mean", x, (*x.shape[:-1], 1))
    t.record(y, (x,), lambda g: [t.pointwise("aten.div", g, shape=x.shape)])
    return y


@rule("dropout")
def dropout(t: Tracer, x: Value, p: float) -> Value:
    """Random numbers, a mask of bools, a product; the mask is what the partitioner finds cheapest to keep."""
    if p == 0:
        return x
    numbers = t.pointwise("aten.rand_like", x, dtype="fp32")
    numbers.random = True
    mask = t.pointwise("aten.gt", numbers, dtype="bool")
    y = t.pointwise("aten.mul", x, mask)
    t.record(y, (x,), lambda g: [t.pointwise("aten.mul", g, mask)])
    return y


# -- views -----------------------------------------------------------------------------------------------------
def viewed(t: Tracer, x: Value, shape: Shape, strides: st.Strides, dtype: str = "") -> Value:
    """A view whose gradient is the gradient seen in the old shape, in its own dtype unless the view changes that."""
    y = t.view(x, shape, strides, dtype)
    t.record(y, (x,), lambda g: [plain_view(t, g, x.shape, x.dtype if dtype else "")])
    return y


def plain_view(t: Tracer, x: Value, shape: Shape, dtype: str = "") -> Value:
    """x in another shape, copied where its strides do not allow a view; no graph of its own."""
    possible, strides = st.view(x.shape, x.strides, shape) if not dtype or dtype == x.dtype else (True, None)
    if not possible:
        x, strides = t.pointwise("aten.clone", x), None
        x.strides = None
    return x if x.shape == shape and not dtype else t.view(x, shape, strides, dtype or x.dtype)


@rule("reshape")
@rule("view")
def reshape(t: Tracer, x: Value, shape: Shape) -> Value:
    if -1 in shape:
        known = -prod(shape)
        shape = tuple(prod(x.shape) // known if n == -1 else n for n in shape)
    possible, strides = st.view(x.shape, x.strides, shape)
    return viewed(t, x if possible else clone(t, x), shape, strides if possible else None)


@rule("clone")
def clone(t: Tracer, x: Value) -> Value:
    """A copy in plain order."""
    y = t.pointwise("aten.clone", x)
    y.strides = None
    t.record(y, (x,), lambda g: [g])
    return y


@rule("contiguous")
def contiguous(t: Tracer, x: Value) -> Value:
    return x if x.strides is None else clone(t, x)


@rule("unsqueeze")
def unsqueeze(t: Tracer, x: Value, dim: int) -> Value:
    return reshape(t, x, (*x.shape[:dim], 1, *x.shape[dim:]))


@rule("transpose")
def transpose(t: Tracer, x: Value, a: int, b: int) -> Value:
    y = t.view(x, *st.transpose(x.shape, x.strides, a, b))
    t.record(y, (x,), lambda g: [t.view(g, *st.transpose(g.shape, g.strides, a, b))])
    return y


@rule("expand")
def expand(t: Tracer, x: Value, shape: Shape) -> Value:
    y = t.view(x, shape, st.expand(x.shape, x.strides, shape))
    t.record(y, (x,), lambda g: [g])  # summed to x's shape by the engine
    return y


@rule("slice")
def slice_(t: Tracer, x: Value, dim: int, start: int, length: int) -> Value:
    shape = list(x.shape)
    shape[dim % len(shape)] = length
    return _part(t, x, tuple(shape))


def _part(t: Tracer, x: Value, shape: Shape) -> Value:
    """A part of x along a dimension. Its gradient is put among zeros."""
    y = _slice(t, x, shape)
    t.record(y, (x,), lambda g: [t.pointwise("aten.slice_backward", g, shape=x.shape)])
    return y


def _slice(t: Tracer, x: Value, shape: Shape) -> Value:
    full = x.strides if x.strides is not None else st.plain(x.shape)
    return t.view(x, shape, st.normalize(shape, full))


@rule("split")
def split(t: Tracer, x: Value, size: int) -> tuple[Value, ...]:
    """Parts along the last dimension; their gradients are put together by one kernel."""
    parts = tuple(_slice(t, x, (*x.shape[:-1], size)) for _ in range(x.shape[-1] // size))

    def backward(*gradients: Value | None) -> Gradients:
        return [t.pointwise("aten.cat", *(g for g in gradients if g is not None), shape=x.shape)]

    t.record(parts, (x,), backward)
    return parts


@rule("cat_last")
def cat_last(t: Tracer, parts: tuple[Value, ...]) -> Value:
    y = t.pointwise("aten.cat", *parts, shape=(*parts[0].shape[:-1], sum(p.shape[-1] for p in parts)))
    y.recomputable = False
    t.record(y, parts, lambda g: [_slice(t, g, p.shape) for p in parts])
    return y


@rule("view_as_complex")
def view_as_complex(t: Tracer, x: Value) -> Value:
    """[..., D] fp32 seen as [..., D/2] complex64."""
    plain: Value = contiguous(t, x)
    return viewed(t, plain, (*x.shape[:-1], x.shape[-1] // 2), None, "complex64")


@rule("view_as_real")
def view_as_real(t: Tracer, z: Value) -> Value:
    return viewed(t, z, (*z.shape[:-1], 2 * z.shape[-1]), None, "fp32")
