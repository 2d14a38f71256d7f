"""Products in 8 and 4 bit: what a file of fp8 linear layers says of the product in it, and ratios on Blackwell.

A measured fp8 layer is a pass that quantises A and a product. The product starts and moves bytes as one in 16 bit does;
what is left of the layer's fixed time and bytes is the pass's, which is a kernel of its own in the simulation.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from calibration.fit.evidence import Errors, FamilyFit, Floats, Row, held_out, significant
from calibration.fit.gemm_data import TRAINING_WEIGHT, aiconfigurator, training_region
from calibration.fit.gemm_time import Products, gemm_ns
from calibration.fit.solve import fit
from sim.cost.figures import Figure
from sim.cost.gemm import GemmForm

BOUNDS = {
    "efficiency": (0.7, 0.2, 1.0),
    "tile_edge_cost": (5.0, 0.1, 60.0),
    "k_overhead": (300.0, 5.0, 1500.0),
    "pass_us": (6.0, 0.3, 40.0),
    "pass_bandwidth_efficiency": (0.4, 0.05, 1.5),
}
SIGMA = 0.25  # COSTS.md 1.5
QUANTIZE_BYTES = 3
"""Per element of A, read in 16 bit and written in 8."""
TO_16_BIT = {"fp8": 1.75, "fp4": 3.42}
"""Rate of products over that of 16-bit ones, quantised beforehand: Transformer Engine's guide to products on B300, a layer
of 12 products of 15,872 tokens (MXFP8 and NVFP4, pull request 2863)."""
RATIO_SIGMA = 0.15


def predict_us(
    form: GemmForm, work: Products, pass_us: float, pass_bandwidth_efficiency: float, **parameters: float
) -> Floats:
    """Of the whole layer; `form` is that of 16 bit."""
    product = gemm_ns(replace(form, **parameters), work)
    bytes_per_ns = pass_bandwidth_efficiency * form.gpu.memory_bandwidth_bytes_per_s / 1e9
    return np.asarray((product + QUANTIZE_BYTES * work.m * work.k / bytes_per_ns) / 1e3 + pass_us)


def fit_fp8(
    folder: Path, result: FamilyFit, profile: str, file_gpu: str, version: str, costs: str, form: GemmForm, rate: float
) -> None:
    """Constants of 8-bit products. `form`: of 16-bit products in files of the same source, whose rate ships as `rate`; the
    8-bit one is moved by as much."""
    rows = aiconfigurator(folder, file_gpu, "fp8")
    work, us = Products.of(rows, "fp8"), rows.us.to_numpy(float)
    out, region = held_out(len(us)), training_region(rows)
    weights = np.where(region, TRAINING_WEIGHT, 1.0)
    half = fit(partial(predict_us, form, work.where(~out)), us[~out], BOUNDS, weights[~out])
    predicted = predict_us(form, work, **half)
    errors = Errors.of(predicted[out & region], us[out & region])
    result.rows.append(Row("gemm", profile, "fp8, M >= 1024, N, K >= 512", "held out", errors, costs))
    whole = fit(partial(predict_us, form, work), us, BOUNDS, weights)
    origin, error = f"aiconfigurator {version}, fp8, less the pass that quantises A", f"{errors} held out"
    moved = significant(whole["efficiency"] * rate / form.efficiency)
    scaled = (
        f"{origin}: {whole['efficiency']:.3g}, moved as the rate of 16 bit is from its file ({form.efficiency:.3g})"
    )
    result.ship(profile, {
        "gemm.fp8.efficiency": Figure(moved, "published", scaled, error, SIGMA),
        "gemm.fp8.tile_edge_cost": Figure(significant(whole["tile_edge_cost"]), "published", origin, error, SIGMA),
        "gemm.fp8.k_overhead": Figure(significant(whole["k_overhead"]), "published", origin, error, SIGMA),
        **as_16_bit("fp8", form),
    })  # fmt: skip


def as_16_bit(dtype: str, form: GemmForm, *names: str) -> dict[str, Figure]:
    """Fixed time and bandwidth (and other constants by name) of products in `dtype`, as those in 16 bit."""
    own = {"fixed_us": form.fixed_ns / 1e3, "bandwidth_efficiency": form.bandwidth_efficiency}
    own |= {name: getattr(form, name) for name in names}
    return {
        f"gemm.{dtype}.{name}": Figure(significant(value), "assumed", "as products in 16 bit", sigma=SIGMA)
        for name, value in own.items()
    }
