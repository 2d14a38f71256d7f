"""The work of an operator, from what a profiler records of its call: name, shapes and dtypes of inputs, plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from calibration.measure.passes import PASSES
from sim.cost.measured import Measurable
from sim.program.kernels import ITEM_BYTES, Attention, Gemm, Memory

DTYPES = {
    "float": "fp32", "c10::bfloat16": "bf16", "c10::half": "fp16", "c10::float8_e4m3fn": "fp8", "long int": "int64",
    "long": "int64", "int": "int32", "bool": "bool", "unsigned char": "uint8", "c10::complex<float>": "complex64",
}  # fmt: skip
CAUSAL_MASKS = ("1", "2")
"""Of xFormers' kernel: causal from the upper left, from the lower right."""
FUSED, EFFICIENT = "aten::_flash_attention", "aten::_efficient_attention"
CPU_FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
CASTS = ("aten::copy_", "aten::_to_copy")
Arguments = Mapping[str, Any]
Named = tuple[str, Measurable]


def known(name: str) -> bool:
    """Does an operator of this name have work that is read here?"""
    return name in PRODUCTS or name in ATTENTION or name in PASSES


def work_of(name: str, arguments: Arguments) -> Named | None:
    """The kernel's name in a program, and its work; None where the shapes were not recorded or are not understood."""
    try:
        if name in PRODUCTS:
            return _product(name, arguments)
        if name in ATTENTION:
            return _attention(name, arguments)
        return _pass(name, arguments)
    except (IndexError, KeyError, TypeError, ValueError):
        return None


PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::_scaled_mm": 0}
"""Which input is A; B follows."""


def _product(name: str, arguments: Arguments) -> Named | None:
    first = PRODUCTS[name]
    a, b = _dims(arguments)[first : first + 2]
    dtype = _dtype(arguments, first)
    batch, (m, k), n = (prod(a[:-2]), a[-2:], b[-1])
    if b[-2] != k or not m * n * k * batch:
        return None
    return name, Gemm(m, n, k, dtype, batch)


def _attention(name: str, arguments: Arguments) -> Named | None:
    read = ATTENTION[name]
    q, k, v = _dims(arguments)[read.first : read.first + 3]
    if read.head_major:
        (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, _), value_dim = q, k, v[-1]
    else:
        (batch, q_len, heads, head_dim), (_, kv_len, kv_heads, _), value_dim = q, k, v[-1]
    causal = read.is_causal(str(arguments["Concrete Inputs"][read.causal]))
    work = Attention(
        batch, heads, kv_heads, q_len, kv_len, head_dim, causal, name.endswith("backward"), read.generation,
        _dtype(arguments, read.first), 0 if value_dim == head_dim else value_dim,
    )  # fmt: skip
    kernel = FUSED if read.generation == "flash2" else EFFICIENT
    return f"{kernel}_{'backward' if work.backward else 'forward'}", work


class Reading:
    """Where an attention operator keeps its queries, and whether it is causal."""

    def __init__(
        self, generation: str, first: int, causal: int, is_causal: Callable[[str], bool], head_major: bool = False
    ) -> None:
        self.generation, self.first, self.causal = generation, first, causal
        self.is_causal, self.head_major = is_causal, head_major


def _is_true(value: str) -> bool:
    return value == "True"


def _is_causal_mask(value: str) -> bool:
    return value in CAUSAL_MASKS


ATTENTION = {
    f"{FUSED}_forward": Reading("flash2", 0, 8, _is_true),
    f"{FUSED}_backward": Reading("flash2", 1, 11, _is_true),
    f"{EFFICIENT}_forward": Reading("efficient", 0, 9, _is_causal_mask),
    f"{EFFICIENT}_backward": Reading("efficient", 1, 14, _is_causal_mask),
    CPU_FLASH: Reading("flash2", 0, 4, _is_true, head_major=True),
    f"{CPU_FLASH}_backward": Reading("flash2", 1, 7, _is_true, head_major=True),
}


def _pass(name: str, arguments: Arguments) -> Named | None:
    moved, dims = PASSES[name], _dims(arguments)
    family = moved.family
    if name in CASTS:
        source = dims[-1] if name == "aten::_to_copy" else dims[1]
        items = [ITEM_BYTES[_dtype(arguments, number)] for number in range(2)] if name == "aten::copy_" else []
        if not items:
            return None
        size = prod(source) * sum(items)
        family = "copy" if items[0] == items[1] else "elementwise"
    elif name == "aten::embedding":
        (_, width), tokens = dims[0], dims[1]
        size = round(prod(tokens) * width * _bytes_per_element(moved.passes, moved.extra_bytes, _dtype(arguments, 0)))
    else:
        counted = _elements(dims, moved.counted)
        dtype = "fp32" if moved.passes == 0 else _dtype(arguments, 0)
        size = round(counted * _bytes_per_element(moved.passes, moved.extra_bytes, dtype))
    return (name, Memory(family, size)) if size else None


def _elements(dims: list[Any], counted: int) -> int:
    """Of the input that counts, or of all tensors in it where it is a list; of the largest where inputs are broadcast."""
    entry = dims[counted]
    if entry and isinstance(entry[0], list):
        return sum(prod(shape) for shape in entry)
    if counted:
        return prod(entry)
    shapes = [shape for shape in dims if shape and not isinstance(shape[0], list)]
    return max((prod(shape) for shape in shapes), default=0)


def _bytes_per_element(passes: float, extra: float, dtype: str) -> float:
    return passes * ITEM_BYTES[dtype] + extra


def _dims(arguments: Arguments) -> list[Any]:
    return list(arguments["Input Dims"])


def _dtype(arguments: Arguments, number: int) -> str:
    return DTYPES[str(arguments["Input type"][number]).lower()]
