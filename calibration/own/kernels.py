"""Fits of products, attention and memory-bound kernels, with the forms of `sim.cost`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from calibration.fit.evidence import Floats
from calibration.fit.gemm_time import Products, gemm_ns
from calibration.measure.points import TimedPoint
from calibration.own.result import Evidence, OwnFit, fit_some
from sim.cost.attention import AttentionForm
from sim.cost.gemm import GemmForm, gemm_root, is_misaligned
from sim.program.kernels import Attention, Gemm, Memory

GEMM_BOUNDS = {
    "efficiency": (0.7, 0.02, 1.5),
    "fixed_us": (3.0, 0.01, 500.0),
    "bandwidth_efficiency": (0.7, 0.02, 8.0),
    "k_overhead": (150.0, 0.5, 4000.0),
    "tile_edge_cost": (5.0, 0.01, 100.0),
}
GEMM_NEEDED = (1, 3, 5, 8, 8)
PRIMARY = ("bf16", "fp16", "fp32")
"""Whose figures stand under gemm itself, the first that was measured; others under gemm.<dtype>."""
ATTENTION_BOUNDS = {
    "efficiency": (0.5, 0.005, 1.5),
    "backward_rate_ratio": (0.83, 0.1, 4.0),
    "fixed_us": (8.0, 0.01, 2000.0),
    "bandwidth_efficiency": (0.5, 0.01, 8.0),
    "tail_share": (0.3, 0.001, 1.5),
}
ATTENTION_NEEDED = (1, 2, 4, 6, 8)
SHARED = "backward_rate_ratio"
MEMORY_BOUNDS = {"bandwidth_efficiency": (0.7, 0.001, 8.0), "fixed_us": (3.0, 0.001, 2000.0)}
MEMORY_NEEDED = (1, 3)
KERNEL_NEEDED = 3
"""Points from which a kernel of its own gets figures beside its family's."""
CPU_GENERATIONS = ("flash2", "efficient")
"""That a CPU's one fused kernel stands for."""


def fit_gemm(evidence: Evidence, result: OwnFit) -> None:
    """Products by dtype."""
    by_dtype: dict[str, list[TimedPoint]] = defaultdict(list)
    for point in evidence.timed:
        work = point.work
        if isinstance(work, Gemm) and not (work.accumulate or work.grouped or is_misaligned(work)):
            by_dtype[work.dtype].append(point)
    primary = next((dtype for dtype in PRIMARY if dtype in by_dtype), None)
    for dtype, points in by_dtype.items():
        _fit_products(evidence, result, "gemm" if dtype == primary else f"gemm.{dtype}", dtype, points)


def _fit_products(evidence: Evidence, result: OwnFit, root: str, dtype: str, points: Sequence[TimedPoint]) -> None:
    columns = zip(*((p.work.m, p.work.n, p.work.k, p.work.batch) for p in points if isinstance(p.work, Gemm)))
    work = Products(*(np.array(column, float) for column in columns), dtype=dtype)
    measured = evidence.ns(points)
    known = _known(evidence, gemm_root(evidence.base, dtype), GEMM_BOUNDS)

    def predict(**p: float) -> Floats:
        form = GemmForm(
            evidence.facts.gpu, p["efficiency"], p["tile_edge_cost"], p["k_overhead"], p["fixed_us"] * 1e3,
            p["bandwidth_efficiency"],
        )  # fmt: skip
        return gemm_ns(form, work)

    found = fit_some(predict, measured, GEMM_BOUNDS, known, GEMM_NEEDED)
    predicted = predict(**found)
    result.ship(evidence, root, found, predicted, measured)
    result.plot("gemm", f"products in {dtype}", work.flops, predicted, measured, "FLOPs")


def fit_attention(evidence: Evidence, result: OwnFit) -> None:
    """Fused attention by generation and head dimension; a generation's backward has one rate over the forward's."""
    groups: dict[str, dict[int, list[TimedPoint]]] = defaultdict(lambda: defaultdict(list))
    for point in evidence.timed:
        if isinstance(point.work, Attention):
            groups[point.work.generation][point.work.head_dim].append(point)
    if evidence.facts.is_cpu and groups:
        merged: dict[int, list[TimedPoint]] = defaultdict(list)
        for by_head_dim in groups.values():
            for head_dim, points in by_head_dim.items():
                merged[head_dim] += points
        groups = dict.fromkeys(CPU_GENERATIONS, merged)
    for generation, by_head_dim in groups.items():
        found = {d: _fit_heads(evidence, generation, d, points, {}) for d, points in by_head_dim.items()}
        ratios = [found[d][SHARED] for d, points in by_head_dim.items() if _has_backward(points)]
        shared = {SHARED: median(ratios)} if ratios else {}
        for head_dim, points in by_head_dim.items():
            values = _fit_heads(evidence, generation, head_dim, points, shared) if shared else found[head_dim]
            predicted, measured = _predict_heads(evidence, points, values), evidence.ns(points)
            own = {name: value for name, value in values.items() if name != SHARED}
            root = f"attention.{generation}"
            result.ship(evidence, f"{root}.d{head_dim}", own, predicted, measured)
            if shared:
                result.ship(evidence, root, shared, predicted, measured)
                result.errors.pop(root)
            flops = np.array([p.work.flops for p in points if isinstance(p.work, Attention)], float)
            result.plot("attention", f"{generation} d{head_dim}", flops, predicted, measured, "FLOPs")


def _has_backward(points: Sequence[TimedPoint]) -> bool:
    directions = {point.work.backward for point in points if isinstance(point.work, Attention)}
    return directions == {True, False}


def _fit_heads(
    evidence: Evidence, generation: str, head_dim: int, points: Sequence[TimedPoint], shared: Mapping[str, float]
) -> dict[str, float]:
    bounds = {name: bound for name, bound in ATTENTION_BOUNDS.items() if name not in shared}
    needed = [n for name, n in zip(ATTENTION_BOUNDS, ATTENTION_NEEDED) if name not in shared]
    if not _has_backward(points):
        needed = [10**9 if name == SHARED else n for name, n in zip(bounds, needed)]
    known = {SHARED: evidence.base.get(f"attention.{generation}.{SHARED}", ATTENTION_BOUNDS[SHARED][0])}
    known |= {name: start for name, (start, _, _) in bounds.items() if name != SHARED}
    known |= _known(evidence, f"attention.{generation}.d{head_dim}", bounds)

    def predict(**values: float) -> Floats:
        return _predict_heads(evidence, points, {**shared, **values})

    return {**shared, **fit_some(predict, evidence.ns(points), bounds, known, needed)}


def _predict_heads(evidence: Evidence, points: Sequence[TimedPoint], p: Mapping[str, float]) -> Floats:
    form = AttentionForm(
        evidence.facts.gpu, p["efficiency"], p["fixed_us"] * 1e3, p["bandwidth_efficiency"], p["tail_share"], p[SHARED]
    )
    return np.array([form.time(p.work).total_ns for p in points if isinstance(p.work, Attention)])


def fit_memory(evidence: Evidence, result: OwnFit) -> None:
    """Memory-bound kernels by family, and by kernel where there are points enough."""
    families: dict[str, list[TimedPoint]] = defaultdict(list)
    for point in evidence.timed:
        if isinstance(point.work, Memory):
            families[point.work.family].append(point)
    for family, points in families.items():
        _fit_passes(evidence, result, f"memory.{family}", family, points)
        kernels: dict[str, list[TimedPoint]] = defaultdict(list)
        for point in points:
            kernels[point.name].append(point)
        for name, mine in kernels.items():
            if len(kernels) > 1 and len(mine) >= KERNEL_NEEDED and "." not in name:
                _fit_passes(evidence, result, f"memory.{family}.{name}", family, mine)
    _plot_memory(evidence, result, families)


def _fit_passes(evidence: Evidence, result: OwnFit, root: str, family: str, points: Sequence[TimedPoint]) -> None:
    size, measured = _bytes(points), evidence.ns(points)
    known = {name: start for name, (start, _, _) in MEMORY_BOUNDS.items()}
    known |= _known(evidence, f"memory.{family}", MEMORY_BOUNDS)
    bandwidth = evidence.facts.gpu.memory_bandwidth_bytes_per_s

    def predict(bandwidth_efficiency: float, fixed_us: float) -> Floats:
        return np.asarray(fixed_us * 1e3 + size / (bandwidth_efficiency * bandwidth) * 1e9)

    found = fit_some(predict, measured, MEMORY_BOUNDS, known, MEMORY_NEEDED)
    result.ship(evidence, root, found, predict(**found), measured)


def _plot_memory(evidence: Evidence, result: OwnFit, families: Mapping[str, Sequence[TimedPoint]]) -> None:
    """Each family with the figures that a simulation would use."""
    for family, points in families.items():
        by_name = {name: value.value for name, value in result.figures.items()}
        roots = [f"memory.{family}.{p.name}" for p in points]
        chosen = [root if f"{root}.fixed_us" in by_name else f"memory.{family}" for root in roots]
        bandwidth = evidence.facts.gpu.memory_bandwidth_bytes_per_s
        predicted = [
            by_name[f"{root}.fixed_us"] * 1e3
            + p.work.bytes / (by_name[f"{root}.bandwidth_efficiency"] * bandwidth) * 1e9
            for root, p in zip(chosen, points)
        ]
        result.plot("memory", family, _bytes(points), np.array(predicted), evidence.ns(points), "bytes")


def _bytes(points: Sequence[TimedPoint]) -> Floats:
    return np.array([point.work.bytes for point in points], float)


def _known(evidence: Evidence, root: str, names: Mapping[str, object]) -> dict[str, float]:
    """Figures of the base under `root`."""
    return {name: evidence.base[f"{root}.{name}"] for name in names if f"{root}.{name}" in evidence.base}
