"""Strides: which views need a copy. Strides are in elements; None stands for plain (C-contiguous) order."""

from __future__ import annotations

from math import prod

Shape = tuple[int, ...]
Strides = tuple[int, ...] | None


def plain(shape: Shape) -> tuple[int, ...]:
    """Strides of a C-contiguous tensor."""
    strides, step = [0] * len(shape), 1
    for i in range(len(shape) - 1, -1, -1):
        strides[i] = step
        step *= shape[i]
    return tuple(strides)


def normalize(shape: Shape, strides: tuple[int, ...]) -> Strides:
    """None where strides mean plain order (dimensions of size 1 do not count)."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size != 1:
            if stride != step:
                return strides
            step *= size
    return None


def transpose(shape: Shape, strides: Strides, a: int, b: int) -> tuple[Shape, Strides]:
    """Shape and strides with dimensions a and b exchanged."""
    order = list(range(len(shape)))
    order[a], order[b] = order[b], order[a]
    full = strides if strides is not None else plain(shape)
    shape = tuple(shape[i] for i in order)
    return shape, normalize(shape, tuple(full[i] for i in order))


def expand(shape: Shape, strides: Strides, target: Shape) -> Strides:
    """Strides of `shape` (same number of dimensions) expanded to `target`: 0 where a size 1 is repeated."""
    full = strides if strides is not None else plain(shape)
    return normalize(target, tuple(0 if s == 1 != t else st for s, t, st in zip(shape, target, full)))


def view(shape: Shape, strides: Strides, target: Shape) -> tuple[bool, Strides]:
    """Can a tensor of these strides be seen as `target` without a copy, and with which strides?

    A run of old dimensions that is contiguous in itself (each stride = next stride x next size) may be cut anew;
    new dimensions may not cross the border between two runs. (The rule of Tensor.view.)
    """
    if strides is None:
        return True, None
    new: list[int] = [0] * len(target)
    position = len(target) - 1
    run_elements, run_stride = 1, strides[-1] if strides else 1
    for i in range(len(shape) - 1, -1, -1):
        run_elements *= shape[i]
        border = i == 0 or (shape[i - 1] != 1 and strides[i - 1] != run_elements * run_stride)
        if not border:
            continue
        used = 1
        while position >= 0 and (used < run_elements or target[position] == 1):
            new[position] = used * run_stride
            used *= target[position]
            position -= 1
        if used != run_elements:
            return False, None
        if i > 0:
            run_elements, run_stride = 1, strides[i - 1]
    if position != -1:
        return False, None
    return True, normalize(target, tuple(new))


def dense(shape: Shape, strides: Strides) -> Strides:
    """The strides themselves if they fill their bytes without gaps, else plain order."""
    return strides if strides == follow(shape, strides) else None


def follow(shape: Shape, strides: Strides) -> Strides:
    """Strides that an elementwise result takes from its input: the same if dense, else the same order made dense."""
    if strides is None:
        return None
    if 0 not in strides and max((n - 1) * st for n, st in zip(shape, strides)) < prod(shape):
        biggest = sum((n - 1) * st for n, st in zip(shape, strides)) + 1
        if biggest == prod(shape):
            return strides
    order = sorted(range(len(shape)), key=lambda i: (-strides[i], i)) if 0 not in strides else range(len(shape))
    dense, step = [0] * len(shape), 1
    for i in reversed(list(order)):
        dense[i] = step
        step *= shape[i]
    return normalize(shape, tuple(dense))
