"""Matrix products: forward, input gradient (dgrad) and weight gradient (wgrad) as a linear layer runs them, and batched.

    python -m calibration.measure.gemm --device cpu --minutes 1

A product C[m, n] = A[m, k] B[k, n] in three layouts: forward multiplies by a transposed weight [n, k], dgrad by the plain
weight [k, n], wgrad a transposed gradient [k, m] by the input [k, n].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from calibration.measure.case import DESIGN, Case
from calibration.measure.command import main
from calibration.measure.device import Device
from calibration.measure.needs_torch import torch
from calibration.measure.operands import Operands, rotated
from calibration.measure.timing import Call
from sim.program.kernels import Gemm

FAMILY = "gemm"
LAYOUTS = ("forward", "dgrad", "wgrad")
FP8_CAPABILITY = (8, 9)
FP8_MULTIPLE = 16
"""torch._scaled_mm asks for sides that are multiples of it."""
CUDA_SIDES, CPU_SIDES = (128, 16_384), (32, 2048)
CUDA_POINTS = {"bf16": 72, "fp16": 18, "fp32": 18, "fp8": 36}
CPU_POINTS = {"fp32": 36}
PEAK_SIDE = 768
"""Of the first product on a CPU: large enough to show a rate that the others can be guessed and scaled from."""
BATCHED_POINTS = 8
NAMES = ("aten::mm", "aten::addmm", "aten::bmm", "router_gemm")
"""Kernels of a program that this script runs."""


def case(work: Gemm, layout: str = "forward", name: str = "", origin: str = DESIGN) -> Case:
    """One product. Its name: as the program calls it, else aten::mm or aten::bmm."""
    name = name or ("aten::bmm" if work.batch > 1 else "aten::mm")

    def build(device: Device) -> Call:
        o = Operands(device, work.dtype)
        if work.dtype == "fp8":
            return rotated(device, lambda: fp8_operands(o, work), fp8_product)
        call: Callable[..., Any] = torch.addmm if name == "aten::addmm" else torch.bmm if work.batch > 1 else torch.mm
        return rotated(device, lambda: operands(o, work, layout, name == "aten::addmm"), call)

    variant = layout if work.batch == 1 else ""
    return Case(FAMILY, work, build, name, variant, origin, bytes_needed=work.bytes)


def operands(o: Operands, work: Gemm, layout: str, with_bias: bool) -> Sequence[Any]:
    """A and B in the layout; a bias before them for addmm; batched ones plain."""
    m, n, k = work.m, work.n, work.k
    if work.batch > 1:
        return o.random(work.batch, m, k), o.random(work.batch, k, n)
    a = o.random(k, m).t() if layout == "wgrad" else o.random(m, k)
    b = o.random(n, k).t() if layout == "forward" else o.random(k, n)
    return (o.random(n), a, b) if with_bias else (a, b)


def fp8_operands(o: Operands, work: Gemm) -> Sequence[Any]:
    """Both in 8 bit, B transposed, a scale for each tensor."""
    a, b = (o.random(rows, work.k, dtype=torch.bfloat16).to(o.dtype) for rows in (work.m, work.n))
    one = torch.ones((), device=o.device)
    return a, b.t(), one, one


def fp8_product(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Any:
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)


def cases(device: Device) -> Iterator[Case]:
    """The covering design: sides spread evenly on a logarithmic scale, every dtype and layout in turn."""
    cpu = device.name == "cpu"
    if cpu:
        yield case(Gemm(PEAK_SIDE, PEAK_SIDE, PEAK_SIDE, "fp32"))
    points, sides = (CPU_POINTS, CPU_SIDES) if cpu else (CUDA_POINTS, CUDA_SIDES)
    for dtype, count in points.items():
        if dtype == "fp8" and not has_fp8(device):
            continue
        multiple = FP8_MULTIPLE if cpu or dtype == "fp8" else 8
        for number, (m, n, k) in enumerate(spread_sides(count, *sides, multiple)):
            yield case(Gemm(m, n, k, dtype), LAYOUTS[number % len(LAYOUTS)])
    dtype = next(iter(points))
    for number, (m, n, k) in enumerate(spread_sides(BATCHED_POINTS, sides[0], sides[1] // 8, 8)):
        yield case(Gemm(m, n, k, dtype, batch=4 << number % 4))


def spread_sides(count: int, least: int, most: int, multiple: int) -> Iterator[tuple[int, ...]]:
    """`count` triples that cover the cube of sides evenly (additive recurrence), each a multiple of `multiple`."""
    steps = np.array([0.8191725134, 0.6710436067, 0.5497004779])  # 1/g, 1/g^2, 1/g^3 with g^4 = g + 1
    for number in range(1, count + 1):
        places = (0.5 + steps * number) % 1
        sides = least * (most / least) ** places
        yield tuple(max(int(side) // multiple, 1) * multiple for side in sides)


def has_fp8(device: Device) -> bool:
    capability = device.info().capability
    return capability is not None and capability >= FP8_CAPABILITY


if __name__ == "__main__":
    main(FAMILY)
