"""Elementwise operators, casts, dropout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sim.model.calls import Shape
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.tape import Tape, strides_like
from sim.runtime.tensor import Tensor

_RANK = {"bool": 0, "uint8": 1, "int32": 2, "int64": 3, "bf16": 4, "fp16": 4, "fp32": 5, "complex64": 6}


def promote(a: str, b: str) -> str:
    """The wider of two dtypes."""
    return a if _RANK[a] >= _RANK[b] else b


def broadcast(a: Shape, b: Shape) -> Shape:
    """The shape of a + b."""
    if a == b:
        return a
    n = max(len(a), len(b))
    wide_a, wide_b = (1,) * (n - len(a)) + a, (1,) * (n - len(b)) + b
    return tuple(max(x, y) for x, y in zip(wide_a, wide_b))


def _result(tape: Tape, name: str, a: Tensor, b: Tensor, dtype: str, shape: Shape) -> Tensor:
    """Output of a binary operator: its order follows the first operand of full shape that is not in plain order."""
    strides = None
    for x in (a, b):
        if x.shape == shape and x.strides is not None:
            strides = strides_like(x)
            break
    return tape.pointwise(name, shape, dtype, strides, a.bytes + b.bytes)


def _gradient(tape: Tape, name: str, like: Tensor, read_bytes: int, dtype: str | None = None) -> Tensor:
    return tape.pointwise(name, like.shape, dtype or like.dtype, strides_like(like), read_bytes)


class Add(Op):
    """Saves nothing. Backward hands the same gradient to both inputs (a second handle for the second)."""

    node = "AddBackward0"
    aten = "aten.add"

    @staticmethod
    def forward(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
        return _result(tape, "aten::add", a, b, promote(a.dtype, b.dtype), broadcast(a.shape, b.shape))

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        if not node.needs(0):
            return [None, gradient]
        return [gradient, gradient.detach() if node.needs(1) else None]


class AddScalar(Op):
    node = "AddBackward0"
    aten = "aten.add"

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        return _gradient(tape, "aten::add", x, x.bytes)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [gradients[0]]


class Mul(Op):
    """Saves each factor if the other needs a gradient. The gradient of `other` is computed before that of `self`.

    A saved complex factor is conjugated into a copy before the product, which dies after it (TAPE_LLAMA_FSDP.md 1).
    """

    node = "MulBackward0"
    aten = "aten.mul"

    @staticmethod
    def saved_inputs(node: Node, a: Tensor, b: Tensor) -> Iterable[Tensor | None]:
        return (b if a.requires_grad else None, a if b.requires_grad else None)

    @staticmethod
    def forward(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
        return _result(tape, "aten::mul", a, b, promote(a.dtype, b.dtype), broadcast(a.shape, b.shape))

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        other, self_ = saved
        gradient = first(gradients)
        result: Gradients = [None, None]
        if node.needs(1):
            result[1] = _gradient(tape, "aten::mul", gradient, gradient.bytes + self_.bytes)
        if node.needs(0):
            conjugate = None
            if other.dtype == "complex64":
                conjugate = tape.pointwise("aten::conj", other.shape, "complex64", None, other.bytes)
            result[0] = _gradient(tape, "aten::mul", gradient, gradient.bytes + other.bytes)
            del conjugate
        return result


class MulScalar(Op):
    """Saves nothing; one product backward."""

    node = "MulBackward1"
    aten = "aten.mul"

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        return _gradient(tape, "aten::mul", x, x.bytes)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        return [_gradient(tape, "aten::mul", gradient, gradient.bytes)]


class _Activation(Op):
    """One kernel that saves its input; one kernel backward."""

    @staticmethod
    def saved_inputs(node: Node, x: Tensor) -> Iterable[Tensor | None]:
        return (x,)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        name = node.op.aten.replace("aten.", "aten::") + "_backward"
        return [_gradient(tape, name, gradient, gradient.bytes + saved[0].bytes)]


class Silu(_Activation):
    node = "SiluBackward0"
    aten = "aten.silu"

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        return _gradient(tape, "aten::silu", x, x.bytes)


class Gelu(_Activation):
    node = "GeluBackward0"
    aten = "aten.gelu"

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        return _gradient(tape, "aten::gelu", x, x.bytes)


class Tanh(Op):
    """Saves its result."""

    node = "TanhBackward0"
    aten = "aten.tanh"
    saved_outputs = (0,)

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        return _gradient(tape, "aten::tanh", x, x.bytes)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        return [_gradient(tape, "aten::tanh_backward", gradient, 2 * gradient.bytes)]


class Relu(Op):
    """Saves its result."""

    node = "ReluBackward0"
    aten = "aten.relu"
    saved_outputs = (0,)

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        return _gradient(tape, "aten::relu", x, x.bytes)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        return [_gradient(tape, "aten::threshold_backward", gradient, 2 * gradient.bytes)]


class Neg(Op):
    node = "NegBackward0"
    aten = "aten.neg"

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        return _gradient(tape, "aten::neg", x, x.bytes)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        return [_gradient(tape, "aten::neg", gradient, gradient.bytes)]


class Pow(Op):
    """x.pow(n), saves x. Backward: pow(n - 1), times n, times the gradient: three full buffers alive together."""

    node = "PowBackward0"
    aten = "aten.pow"

    @staticmethod
    def saved_inputs(node: Node, x: Tensor) -> Iterable[Tensor | None]:
        return (x,)

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        return _gradient(tape, "aten::pow", x, x.bytes)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient, x = first(gradients), saved[0]
        power = _gradient(tape, "aten::pow", x, x.bytes)
        scaled = _gradient(tape, "aten::mul", power, power.bytes)
        return [_gradient(tape, "aten::mul", gradient, gradient.bytes + scaled.bytes)]


class Rsqrt(Op):
    """Saves its result. Backward: pow(3), times -0.5, times the gradient: three buffers, all alive to the end."""

    node = "RsqrtBackward0"
    aten = "aten.rsqrt"
    saved_outputs = (0,)

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        return _gradient(tape, "aten::rsqrt", x, x.bytes)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient, result = first(gradients), saved[0]
        power = _gradient(tape, "aten::pow", result, result.bytes)
        scaled = _gradient(tape, "aten::mul", power, power.bytes)
        return [_gradient(tape, "aten::mul", gradient, gradient.bytes + scaled.bytes)]


class MeanLast(Op):
    """x.mean(-1, keepdim=True), saves nothing. Backward: expand / n, one full buffer."""

    node = "MeanBackward1"
    aten = "aten.mean"

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        return tape.pointwise("aten::mean", (*x.shape[:-1], 1), x.dtype, None, x.bytes, "reduce")

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        return [tape.pointwise("aten::div", node.metas[0][0], gradient.dtype, None, gradient.bytes)]


class Mean(Op):
    """x.mean() over all elements, saves nothing. Backward: expand / n, one full buffer."""

    node = "MeanBackward0"
    aten = "aten.mean"

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        return tape.pointwise("aten::mean", (), x.dtype, None, x.bytes, "reduce")

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        return [tape.pointwise("aten::div", node.metas[0][0], gradient.dtype, None, gradient.bytes)]


class Dropout(Op):
    """native_dropout: allocates the bool mask, then the result; saves the mask."""

    node = "NativeDropoutBackward0"
    aten = "aten.native_dropout"
    saved_outputs = (1,)
    not_differentiable = (1,)

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = tape.empty(x.shape, "bool", strides_like(x))
        out = tape.pointwise("aten::native_dropout", x.shape, x.dtype, strides_like(x), x.bytes + mask.bytes, "dropout")
        return out, mask

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        return [_gradient(tape, "aten::native_dropout_backward", gradient, gradient.bytes + saved[0].bytes)]


class ToCopy(Op):
    """A cast. Saves nothing; backward casts back."""

    node = "ToCopyBackward0"
    aten = "aten._to_copy"

    @staticmethod
    def forward(tape: Tape, x: Tensor, dtype: str) -> Tensor:
        return tape.cast_copy(x, dtype)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [tape.cast_copy(first(gradients), node.metas[0][1])]


@rule("to")
def to(tape: Tape, x: Tensor, dtype: str) -> Tensor:
    """x itself where the dtype is right already."""
    if x.dtype == dtype:
        return x
    return tape.apply(ToCopy, (x,), dtype)


def autocast_to(tape: Tape, x: Tensor | None, dtype: str) -> Tensor | None:
    """Autocast's cached cast: copies of fp32 leaves that require grad live until the outermost context ends."""
    if x is None or x.dtype == dtype or x.dtype not in ("fp32", "bf16", "fp16"):
        return x
    cacheable = dtype != "fp32" and x.requires_grad and x.node is None and x.base is None
    if not cacheable:
        return to(tape, x, dtype)
    entry = tape.autocast_cache.get(id(x))
    if entry is None:
        entry = tape.autocast_cache[id(x)] = (to(tape, x, dtype), x)
    return entry[0]


@rule("add")
def add(tape: Tape, a: Tensor, b: Tensor | float) -> Tensor:
    return tape.apply(Add, (a, b)) if isinstance(b, Tensor) else tape.apply(AddScalar, (a,))


@rule("mul")
def mul(tape: Tape, a: Tensor, b: Tensor | float) -> Tensor:
    return tape.apply(Mul, (a, b)) if isinstance(b, Tensor) else tape.apply(MulScalar, (a,))


@rule("dropout")
def dropout(tape: Tape, x: Tensor, p: float) -> Tensor:
    if p == 0:
        return x
    return tape.apply_tuple(Dropout, (x,))[0]


def _unary(name: str, op: type[Op]) -> None:
    def execute(tape: Tape, x: Tensor) -> Tensor:
        return tape.apply(op, (x,))

    Tape.rules[name] = execute


def _unary_in_fp32(name: str, op: type[Op]) -> None:
    """Operators on autocast's list of those that run in fp32."""

    def execute(tape: Tape, x: Tensor) -> Tensor:
        wide = autocast_to(tape, x, "fp32") if tape.autocast_dtype else x
        return tape.apply(op, (wide,))

    Tape.rules[name] = execute


for _name, _op in {
    "silu": Silu,
    "gelu": Gelu,
    "relu": Relu,
    "tanh": Tanh,
    "neg": Neg,
    "mean_last": MeanLast,
    "mean": Mean,
}.items():
    _unary(_name, _op)
for _name, _op in {"pow2": Pow, "pow3": Pow, "rsqrt": Rsqrt}.items():
    _unary_in_fp32(_name, _op)
