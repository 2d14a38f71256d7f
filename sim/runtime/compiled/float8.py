"""8-bit numbers in compiled regions, as torchao's Float8Linear makes them: dynamic scales, one per tensor or per row.

A scale is one over the largest magnitude. Casts have no layout of their own: each product gets a copy in the order that
it reads (Inductor writes one per product, seen in its wrappers).
"""

from __future__ import annotations

from typing import Literal

from sim.runtime.compiled.graph import Value
from sim.runtime.compiled.trace import Tracer

Along = Literal["row", "column"]


def scale(t: Tracer, x: Value, along: Along, again: bool = False) -> Value:
    """Scales of x [m, k]: one number (tensorwise), [m, 1] by row or [1, k] by column. Equal ones are computed once per
    pass; `again`: backward's own, of what forward has scaled before."""
    if x.storage in t.scaled:
        return t.scaled[x.storage][0]
    shape = {"row": (x.shape[0], 1), "column": (1, x.shape[1])}[along] if t.float8 == "rowwise" else ()
    key = (x.storage, f"{along if shape else 'whole'} scale{' again' if again else ''}")
    if key not in t.casts:
        magnitude = t.pointwise("aten.abs", x)
        largest = t.reduction("aten.max", magnitude, shape, column=along == "column")
        t.casts[key] = t.pointwise("aten.reciprocal", largest, dtype="fp32")
    return t.casts[key]


def cast(t: Tracer, x: Value, by: Value) -> Value:
    """x times its scale, clamped, in 8 bit."""
    y = t.pointwise("aten._to_copy", x, by, dtype="fp8")
    y.strides = None
    return y


def in_8_bit(t: Tracer, x: Value, by: Value) -> Value:
    """x as a product reads it: cast, or as it came."""
    return x if x.dtype == "fp8" else cast(t, x, by)


def layout(t: Tracer, x: Value) -> Value:
    """A copy of 8-bit numbers in the other order."""
    y = t.pointwise("aten.clone", x)
    y.strides = None
    return y
