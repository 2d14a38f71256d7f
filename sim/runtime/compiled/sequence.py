"""How tensor-parallel redistributions trace: functional collectives, waited for at once, and copies that may fuse.

Asynchronously (`micro_pipeline.py`) what is gathered or scattered along tokens needs no copies: it goes in pieces that lie
where they belong.
"""

from __future__ import annotations

from typing import Literal

from sim.program.kernels import Collective
from sim.program.program import COMPUTE
from sim.runtime.compiled.float8 import cast
from sim.runtime.compiled.graph import Extern, Value
from sim.runtime.compiled.trace import Gradients, Meta, Tracer, rule
from sim.runtime.ops.tensor_parallel import GROUP
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor

Kind = Literal["all_gather", "reduce_scatter"]
NAMES = {
    "all_gather": "_c10d_functional.all_gather_into_tensor",
    "reduce_scatter": "_c10d_functional.reduce_scatter_tensor",
}


def _collective(t: Tracer, kind: Kind, x: Value, shape: tuple[int, ...], ranks: int) -> Value:
    def run(tape: Tape, inputs: list[Tensor], _: Tensor | None) -> tuple[Tensor, ...]:
        out = tape.empty(shape, x.dtype)
        whole = max(inputs[0].bytes, out.bytes)
        tape.recorder.collective(Collective(kind, whole, GROUP, ranks, x.dtype), COMPUTE)
        return (out,)

    return t.extern(NAMES[kind], (x,), Extern(run, meets=kind, ranks=ranks), Meta(shape, x.dtype))[0]


def _gathered(t: Tracer, x: Value, ranks: int) -> Value:
    """With one scale per tensor what 8-bit products read is cast before it is gathered (torchao's Float8ColwiseParallel and
    PrepareFloat8ModuleInput; gradients in Float8RowwiseParallel): the ranks agree on the scale."""
    if t.float8 != "tensorwise":
        return _together(t, x, ranks)
    largest = t.reduction("aten.max", t.pointwise("aten.abs", x), ())
    agreed = _agreed(t, largest, ranks)
    by = t.pointwise("aten.reciprocal", agreed, dtype="fp32")
    y = _together(t, cast(t, x, by), ranks)
    t.scaled[y.storage] = by, x.dtype
    return y


def _agreed(t: Tracer, x: Value, ranks: int) -> Value:
    """One number that all ranks have."""

    def run(tape: Tape, inputs: list[Tensor], _: Tensor | None) -> tuple[Tensor, ...]:
        tape.recorder.collective(Collective("all_reduce", 4, GROUP, ranks, "fp32"), COMPUTE)
        return (tape.empty((), x.dtype),)

    return t.extern("_c10d_functional.all_reduce", (x,), Extern(run), Meta((), x.dtype))[0]


def _together(t: Tracer, x: Value, ranks: int) -> Value:
    batch, tokens, *rest = x.shape
    whole = (batch, ranks * tokens, *rest)
    if t.asynchronous:
        return _collective(t, "all_gather", x, whole, ranks)
    pieces = _collective(t, "all_gather", x, (ranks * batch, tokens, *rest), ranks)
    if batch == 1:
        return t.view(pieces, whole, None)
    return t.pointwise("aten.cat", pieces, shape=whole)


def _scattered(t: Tracer, x: Value, ranks: int) -> Value:
    batch, tokens, *rest = x.shape
    if t.asynchronous:
        return _collective(t, "reduce_scatter", x, (batch, tokens // ranks, *rest), ranks)
    pieces = t.pointwise("aten.cat", x, shape=(ranks * batch, tokens // ranks, *rest))
    return _collective(t, "reduce_scatter", pieces, (batch, tokens // ranks, *rest), ranks)


@rule("gather_sequence")
def gather_sequence(t: Tracer, x: Value, ranks: int) -> Value:
    y = _gathered(t, x, ranks)

    def backward(g: Value) -> Gradients:
        return [_scattered(t, g, ranks)]

    t.record(y, (x,), backward)
    return y


@rule("scatter_sequence")
def scatter_sequence(t: Tracer, x: Value, ranks: int) -> Value:
    y = _scattered(t, x, ranks)

    def backward(g: Value) -> Gradients:
        return [_gathered(t, g, ranks)]

    t.record(y, (x,), backward)
    return y
