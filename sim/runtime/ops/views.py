"""Views: they move no bytes forward; backward copies only where strides do not allow a view."""

from __future__ import annotations

from math import prod
from typing import Any

from sim.model.calls import Shape
from sim.program.kernels import ITEM_BYTES
from sim.program.program import COMPUTE
from sim.runtime import scratch
from sim.runtime import strides as st
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op, first, rule
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


def _full_shape(x: Tensor, shape: tuple[int, ...]) -> Shape:
    """Replace a -1 by what is left."""
    if -1 not in shape:
        return shape
    known = -prod(shape)
    return tuple(prod(x.shape) // known if size == -1 else size for size in shape)


def reshaped(tape: Tape, x: Tensor, shape: Shape) -> Tensor:
    """x.reshape(shape) outside the graph: a raw view, or a copy in plain order."""
    possible, strides = st.view(x.shape, x.strides, shape)
    if possible:
        return x.alias(shape, strides)
    return tape.copy(x, shape)


class View(Op):
    """Backward: grad.reshape(input's shape)."""

    node = "ViewBackward0"

    @staticmethod
    def forward(tape: Tape, x: Tensor, shape: Shape, strides: st.Strides) -> Tensor:
        return x.alias(shape, strides)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [reshaped(tape, first(gradients), node.metas[0][0])]


class UnsafeView(View):
    node = "UnsafeViewBackward0"


class Unsqueeze(View):
    node = "UnsqueezeBackward0"


class Clone(Op):
    """A copy in plain order; the gradient passes on."""

    node = "CloneBackward0"
    aten = "aten.clone"

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        return tape.copy(x)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [gradients[0]]


def transposed(x: Tensor, a: int, b: int) -> Tensor:
    """x.transpose(a, b) outside the graph."""
    return x.alias(*st.transpose(x.shape, x.strides, a, b))


class Transpose(Op):
    node = "TransposeBackward0"

    @staticmethod
    def forward(tape: Tape, x: Tensor, a: int, b: int) -> Tensor:
        return transposed(x, a, b)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        return [transposed(first(gradients), *node.attributes)]


class Permute(Op):
    """Backward: the order undone."""

    node = "PermuteBackward0"

    @staticmethod
    def forward(tape: Tape, x: Tensor, order: tuple[int, ...]) -> Tensor:
        return _permuted(x, order)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        (order,) = node.attributes
        return [_permuted(first(gradients), tuple(order.index(i) for i in range(len(order))))]


def _permuted(x: Tensor, order: tuple[int, ...]) -> Tensor:
    full = x.strides if x.strides is not None else st.plain(x.shape)
    shape = tuple(x.shape[i] for i in order)
    return x.alias(shape, st.normalize(shape, tuple(full[i] for i in order)))


class T(Transpose):
    """weight.t()."""

    node = "TBackward0"


class Expand(Op):
    """Backward: sum to the input's shape, a new buffer."""

    node = "ExpandBackward0"

    @staticmethod
    def forward(tape: Tape, x: Tensor, shape: Shape) -> Tensor:
        return x.alias(shape, st.expand(x.shape, x.strides, shape))

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient, shape = first(gradients), node.metas[0][0]
        if gradient.shape == shape:
            return [gradient]
        return [tape.pointwise("aten::sum", shape, gradient.dtype, None, gradient.bytes, "reduce")]


class Slice(Op):
    """Backward: zeros of the full size, the gradient copied in (TAPE_LLAMA_FSDP.md 1, rope cos/sin)."""

    node = "SliceBackward0"

    @staticmethod
    def forward(tape: Tape, x: Tensor, dim: int, start: int, length: int) -> Tensor:
        shape = list(x.shape)
        shape[dim] = length
        full = x.strides if x.strides is not None else st.plain(x.shape)
        return x.alias(tuple(shape), st.normalize(tuple(shape), full))

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        return [tape.pointwise("aten::zeros", node.metas[0][0], gradient.dtype, None, 2 * gradient.bytes, "fill")]


class Select(Op):
    """x[:, i] along `dim`: a view. Backward: zeros of the full size, the gradient copied in."""

    node = "SelectBackward0"

    @staticmethod
    def forward(tape: Tape, x: Tensor, dim: int) -> Tensor:
        full = x.strides if x.strides is not None else st.plain(x.shape)
        shape = (*x.shape[:dim], *x.shape[dim + 1 :])
        return x.alias(shape, st.normalize(shape, (*full[:dim], *full[dim + 1 :])))

    backward = Slice.backward


class Split(Op):
    """Parts along the last dimension. Backward: one cat of all parts' gradients."""

    node = "SplitBackward0"

    @staticmethod
    def forward(tape: Tape, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        full = x.strides if x.strides is not None else st.plain(x.shape)
        shapes = [(*x.shape[:-1], size) for size in sizes]
        return tuple(x.alias(shape, st.normalize(shape, full)) for shape in shapes)

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        shape, dtype = node.metas[0]
        return [tape.pointwise("aten::cat", shape, dtype, None, sum(g.bytes for g in gradients if g), "copy")]


class SplitRows(Op):
    """Parts along the first dimension. Backward as above."""

    node = "SplitWithSizesBackward0"

    @staticmethod
    def forward(tape: Tape, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(x.alias((size, *x.shape[1:]), x.strides) for size in sizes)

    backward = Split.backward


class Chunk(Op):
    """x.chunk(n, dim=1): parts of a size, the last may be shorter. Backward: one cat of all parts' gradients."""

    node = "SplitBackward0"

    @staticmethod
    def forward(tape: Tape, x: Tensor, size: int) -> tuple[Tensor, ...]:
        full = x.strides if x.strides is not None else st.plain(x.shape)
        length = x.shape[1]
        shapes = [(x.shape[0], min(size, length - start), *x.shape[2:]) for start in range(0, length, size)]
        return tuple(x.alias(shape, st.normalize(shape, full)) for shape in shapes)

    backward = Split.backward


class ViewAsComplex(Op):
    """Backward: view_as_real(grad.contiguous())."""

    node = "ViewAsComplexBackward0"

    @staticmethod
    def forward(tape: Tape, x: Tensor) -> Tensor:
        return x.alias(x.shape[:-1], None, "complex64")

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        plain = gradient if gradient.strides is None else tape.copy(gradient)
        return [plain.alias(node.metas[0][0], None, "fp32")]


class ViewAsReal(Op):
    """Backward: view_as_complex(grad.contiguous())."""

    node = "ViewAsRealBackward0"

    @staticmethod
    def forward(tape: Tape, z: Tensor) -> Tensor:
        strides = None if z.strides is None else (*(2 * s for s in z.strides), 1)
        return z.alias((*z.shape, 2), strides, "fp32")

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        gradient = first(gradients)
        plain = gradient if gradient.strides is None else tape.copy(gradient)
        return [plain.alias(node.metas[0][0], None, "complex64")]


@rule("view")
def view(tape: Tape, x: Tensor, shape: tuple[int, ...], op: type[Op] = View) -> Tensor:
    shape = _full_shape(x, shape)
    possible, strides = st.view(x.shape, x.strides, shape)
    if not possible:
        raise ValueError(f"view of {x.shape} with strides {x.strides} as {shape} is not possible without a copy")
    return tape.apply(op, (x,), shape, strides)


@rule("reshape")
def reshape(tape: Tape, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A view where strides allow, else clone + _unsafe_view."""
    shape = _full_shape(x, shape)
    possible, strides = st.view(x.shape, x.strides, shape)
    if possible:
        return tape.apply(View, (x,), shape, strides)
    copied = tape.apply(Clone, (x,))
    result = tape.apply(UnsafeView, (copied,), shape, None)
    return result


@rule("unsqueeze")
def unsqueeze(tape: Tape, x: Tensor, dim: int) -> Tensor:
    shape = (*x.shape[:dim], 1, *x.shape[dim:])
    return view(tape, x, shape, Unsqueeze)


@rule("transpose")
def transpose(tape: Tape, x: Tensor, a: int, b: int) -> Tensor:
    return tape.apply(Transpose, (x,), a, b)


@rule("permute_dimensions")
def permute_dimensions(tape: Tape, x: Tensor, order: tuple[int, ...]) -> Tensor:
    return tape.apply(Permute, (x,), order)


@rule("expand")
def expand(tape: Tape, x: Tensor, shape: Shape) -> Tensor:
    return tape.apply(Expand, (x,), shape)


@rule("clone")
def clone(tape: Tape, x: Tensor) -> Tensor:
    return tape.apply(Clone, (x,))


@rule("contiguous")
def contiguous(tape: Tape, x: Tensor) -> Tensor:
    """x itself where it is in plain order already."""
    if x.strides is None:
        return x
    return tape.apply(Clone, (x,))


@rule("slice")
def slice_(tape: Tape, x: Tensor, dim: int, start: int, length: int) -> Tensor:
    return tape.apply(Slice, (x,), dim % len(x.shape), start, length)


@rule("select")
def select(tape: Tape, x: Tensor, dim: int) -> Tensor:
    return tape.apply(Select, (x,), dim)


@rule("split")
def split(tape: Tape, x: Tensor, size: int | tuple[int, ...]) -> tuple[Tensor, ...]:
    sizes = size if isinstance(size, tuple) else (size,) * (x.shape[-1] // size)
    return tape.apply_tuple(Split, (x,), sizes)


@rule("split_rows")
def split_rows(tape: Tape, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tape.apply_tuple(SplitRows, (x,), sizes)


@rule("chunk")
def chunk(tape: Tape, x: Tensor, chunks: int) -> tuple[Tensor, ...]:
    return tape.apply_tuple(Chunk, (x,), -(-x.shape[1] // chunks))


@rule("view_as_complex")
def view_as_complex(tape: Tape, x: Tensor) -> Tensor:
    """x.reshape(..., D/2, 2) seen as complex."""
    pairs = reshape(tape, x, (*x.shape[:-1], x.shape[-1] // 2, 2))
    return tape.apply(ViewAsComplex, (pairs,))


@rule("view_as_real")
def view_as_real(tape: Tape, z: Tensor) -> Tensor:
    """Seen as real pairs, flattened to the last dimension."""
    pairs = tape.apply(ViewAsReal, (z,))
    return view(tape, pairs, (*z.shape[:-1], 2 * z.shape[-1]), UnsafeView if z.strides is not None else View)


@rule("empty")
def empty(tape: Tape, shape: Shape, dtype: str) -> Tensor:
    return tape.empty(shape, dtype)


@rule("global_buffer")
def global_buffer(tape: Tape, elements: int, dtype: str) -> Tensor:
    return tape.global_buffer(elements, dtype)


@rule("compute")
def compute(tape: Tape, name: str, shape: Shape, dtype: str, inputs: tuple[Tensor, ...]) -> Tensor:
    """Outside the graph: the output and its kernel."""
    return tape.pointwise(f"aten::{name}", shape, dtype, None, sum(x.bytes for x in inputs))


@rule("run_in_place")
def run_in_place(tape: Tape, name: str, x: Tensor) -> None:
    tape.recorder.memory_bound(f"aten::{name}", "elementwise", 2 * x.bytes)


@rule("zeros")
def zeros(tape: Tape, shape: Shape, dtype: str, requires_grad: bool) -> Tensor:
    x = tape.pointwise("aten::zeros", shape, dtype, None, 0, "fill")
    x.requires_grad = requires_grad
    return x


@rule("cumsum")
def cumsum(tape: Tape, x: Tensor, dtype: str) -> Tensor:
    """The result, a copy of an input of another dtype, and cub's temporary storage where there is one row only."""
    result = tape.empty(x.shape, dtype)
    wide = tape.cast_copy(x, dtype) if x.dtype != dtype else x
    if x.elements == x.shape[-1]:
        tape.scratch(scratch.cub_scan(x.elements, ITEM_BYTES[dtype]))
    tape.recorder.memory_bound("aten::cumsum", "elementwise", wide.bytes + result.bytes)
    return result


@rule("record_for_host")
def record_for_host(tape: Tape) -> int:
    return tape.recorder.record(COMPUTE)


@rule("wait_on_host")
def wait_on_host(tape: Tape, event: int) -> None:
    tape.recorder.sync(event)


@rule("read_on_host")
def read_on_host(tape: Tape) -> None:
    tape.recorder.sync(tape.recorder.record(COMPUTE))
