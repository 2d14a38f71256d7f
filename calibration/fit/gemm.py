"""Fit of the GEMM form: E, c, K0, t0 and eta per GPU from one source, and the rate shipped, which weighs all.

python -m calibration.fit.gemm [FOLDER] [--plots FOLDER]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from calibration.fit.command import main
from calibration.fit.evidence import Cloud, Errors, FamilyFit, Floats, Mask, Row, held_out, read, significant, spread
from calibration.fit.gemm_data import TRAINING_WEIGHT, Timed, aiconfigurator, ett, simumax, training_region, vidur
from calibration.fit.gemm_fp8 import fit_fp8
from calibration.fit.gemm_time import Products, gemm_ns
from calibration.fit.rates import SHIPPED
from calibration.fit.solve import fit
from sim.cost.figures import SINGLE_SOURCE, Figure, Label
from sim.cost.gemm import GemmForm
from sim.hardware.catalogue import find_gpu

BOUNDS = {
    "efficiency": (0.8, 0.2, 1.0),
    "tile_edge_cost": (5.0, 0.1, 60.0),
    "k_overhead": (150.0, 5.0, 800.0),
    "fixed_us": (3.0, 0.3, 20.0),
    "bandwidth_efficiency": (0.7, 0.2, 1.0),
}
SHAPE_SIGMA = 0.1
"""Of bandwidth efficiency and fixed time: what one file leaves open."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file of aiconfigurator: its GPU there, ours, and what COSTS.md 1.2 found (errors; E, c, K0, t0, eta)."""

    profile: str
    file_gpu: str
    gpu: str
    version: str
    costs: tuple[str, str]
    costs_parameters: tuple[float, float, float, float, float]
    fp8_costs: str = ""


SOURCES = (
    Source(
        "a100-sxm-80", "a100_sxm", "a100-sxm-80gb", "vLLM 0.14", ("4.7/12.9", "6.6/18.9"), (0.907, 20.9, 203, 3.4, 0.63)
    ),
    Source(
        "h100-sxm",
        "h100_sxm",
        "h100-sxm-80gb",
        "vLLM 0.24",
        ("4.3/12.6", "6.1/19.9"),
        (0.875, 1, 187, 2.6, 0.8),
        "8-9/22-25",
    ),
    Source(
        "h200-sxm",
        "h200_sxm",
        "h200-sxm-141gb",
        "vLLM 0.22, power sampled",
        ("3.5/12.1", "5.4/19.4"),
        (0.737, 0.36, 133, 2.5, 0.73),
    ),
    Source(
        "b200-sxm",
        "b200_sxm",
        "b200-sxm-180gb",
        "vLLM 0.22, power sampled",
        ("6.5/16.8", "8.6/25.8"),
        (0.659, 1.5, 104, 2.1, 0.7),
    ),
    Source(
        "gb200",
        "gb200",
        "gb200-186gb",
        "vLLM 0.22, power sampled",
        ("8.2/19.2", "9.5/26.5"),
        (0.634, 0.1, 130, 2.1, 0.69),
        "8-9/22-25",
    ),
    Source(
        "l40s", "l40s", "l40s-48gb", "vLLM 0.24", ("8.7/20.3", "10.5/40.6"), (0.708, 5.6, 184, 0.9, 0.8), "8-9/22-25"
    ),
)

TRANSFERS = (
    ("a100-sxm-80", "a100-sxm-80gb", "ett", "a100_sxm"),
    ("a100-sxm-80", "a100-sxm-80gb", "vidur", "a100"),
    ("h100-sxm", "h100-sxm-80gb", "vidur", "h100"),
    ("h100-sxm", "gh200-96gb", "ett", "gh200"),
)
"""Sources that nothing is fitted to: profile whose single-source figures predict, GPU that ran, reader, its name."""
TRANSFER_COSTS = {
    ("a100-sxm-80", "ett, linears forward"): "6.3/17.7",
    ("a100-sxm-80", "ett, linears backward"): "4.3/13.1",
    ("a100-sxm-80", "Vidur, eager, M >= 1024"): "12.8/21.0",
    ("h100-sxm", "Vidur, eager, M >= 1024"): "14.0/23.8",
    ("h100-sxm", "Vidur, eager, M < 1024"): "24.8/39.7",
    ("h100-sxm", "ett, linears forward"): "3.6/11.7",
    ("h100-sxm", "ett, linears backward"): "7.3/17.4",
}
MAXIMUM_RATES = {
    "a100-sxm-80": "A100-SXM",
    "a100-pcie": "A100-PCIe",
    "h100-sxm": "H100-SXM/H200",
    "h200-sxm": "H100-SXM/H200",
    "gh200": "GH200-900W",
    "b200-sxm": "B200",
    "gb200": "GB200",
}
"""Rows of mamf.csv: the fastest product that a search over shapes found."""


def form_of(gpu: str, p: dict[str, float]) -> GemmForm:
    """The form with fitted parameters."""
    return GemmForm(
        find_gpu(gpu), p["efficiency"], p["tile_edge_cost"], p["k_overhead"], p["fixed_us"] * 1e3,
        p["bandwidth_efficiency"],
    )  # fmt: skip


def predict_us(gpu: str, work: Products, **parameters: float) -> Floats:
    return gemm_ns(form_of(gpu, parameters), work) / 1e3


def fit_gemm(folder: Path) -> FamilyFit:
    """All GPUs with data: parameters, shipped rates with the spread of their sources, table rows."""
    result = FamilyFit("gemm")
    forms = {source.profile: _fit_source(folder, source, result) for source in SOURCES}
    rates = {profile: [form.efficiency] for profile, form in forms.items()}
    for profile, gpu, reader, name in TRANSFERS:
        form = replace(forms[profile], gpu=find_gpu(gpu))
        scales = _transfer(result, profile, form, list(_read(folder, reader, name)))
        if form.gpu == forms[profile].gpu:  # the sets of one source are one opinion
            rates[profile].append(form.efficiency / float(np.exp(np.mean(np.log(scales)))))
    rates["gh200"] = [_fit_gh200(folder, forms["h100-sxm"], result)]
    rates["a100-pcie"] = [_fit_a100_pcie(folder, forms["a100-sxm-80"], result)]
    rates["b200-sxm"].append(_score_b200(folder, forms["b200-sxm"], result))
    for profile, found in rates.items():
        result.ship(profile, _shipped(folder, profile, found))
    return result


def _fit_source(folder: Path, source: Source, result: FamilyFit) -> GemmForm:
    """Fit on half of the file, score the other half, ship what all of it gives."""
    rows = aiconfigurator(folder, source.file_gpu, "bfloat16")
    work, us, region = Products.of(rows), rows.us.to_numpy(float), training_region(rows)
    weights = np.where(region, TRAINING_WEIGHT, 1.0)
    out = held_out(len(us))
    half = fit(partial(predict_us, source.gpu, work.where(~out)), us[~out], BOUNDS, weights[~out])
    predicted = predict_us(source.gpu, work, **half)
    costs = predict_us(source.gpu, work, **dict(zip(BOUNDS, source.costs_parameters)))
    for what, part, known in (
        ("M >= 1024, N, K >= 512", out & region, source.costs[0]),
        ("all >= 64", out, source.costs[1]),
    ):
        same = Errors.of(costs[part], us[part])
        errors = Errors.of(predicted[part], us[part])
        text = f"{known}; its parameters on these points {same}"
        result.rows.append(Row("gemm", source.profile, f"bf16, {what}", "held out", errors, text))
    shown = out & region
    result.clouds.append(
        Cloud(f"{source.profile} bf16, held out", work.flops[shown], us[shown], predicted[shown], "FLOPs")
    )
    whole = fit(partial(predict_us, source.gpu, work), us, BOUNDS, weights)
    origin = f"aiconfigurator {source.version}, bf16, cuBLAS"
    error = f"{result.rows[-2].errors} held out, M >= 1024"
    result.ship(source.profile, _parameters(whole, origin, error))
    form = form_of(source.gpu, {name: significant(value) for name, value in whole.items()})
    if (read(folder, "gemm").query(f"gpu == '{source.file_gpu}'").dtype == "fp8").any():
        rate = SHIPPED[source.profile].value
        fit_fp8(folder, result, source.profile, source.file_gpu, source.version, source.fp8_costs, form, rate)
    return form


def _parameters(p: dict[str, float], source: str, error: str) -> dict[str, Figure]:
    names = ("tile_edge_cost", "k_overhead", "fixed_us", "bandwidth_efficiency")
    figures = {f"gemm.{n}": Figure(significant(p[n]), "published", source, error, SHAPE_SIGMA) for n in names}
    rate = Figure(significant(p["efficiency"]), "published", source, error)
    return {**figures, f"{SINGLE_SOURCE}gemm.efficiency": rate}


def _read(folder: Path, reader: str, name: str) -> Iterator[Timed]:
    return ett(folder, name) if reader == "ett" else vidur(folder, name)


def _transfer(result: FamilyFit, profile: str, form: GemmForm, sets: list[Timed]) -> list[float]:
    """Score a source that was not fitted; returns measured / predicted of its sets of large unbatched products."""
    scales = []
    ran = "" if form.gpu.name.startswith(profile[:4]) else f"{form.gpu.name}: "
    for timed in sets:
        predicted = _sum_us(form, timed)
        errors = Errors.of(predicted, timed.us)
        costs = TRANSFER_COSTS.get((profile, timed.name), "")
        result.rows.append(Row("gemm", profile, ran + timed.name, "other source", errors, costs))
        if "batched" in timed.name:
            title = f"{ran or profile + ': '}{timed.name}, nothing fitted"
            result.clouds.append(Cloud(title, timed.parts[0].flops, timed.us, predicted, "FLOPs"))
        elif "M < 1024" not in timed.name:
            scales.append(errors.scale)
    return scales


def _sum_us(form: GemmForm, timed: Timed) -> Floats:
    return np.asarray(np.sum([gemm_ns(form, part) for part in timed.parts], axis=0) / 1e3)


def _fit_gh200(folder: Path, h100: GemmForm, result: FamilyFit) -> float:
    """E of GH200 from ett's linears; everything else as H100."""
    sets = [timed for timed in ett(folder, "gh200") if "linears" in timed.name]
    us = np.concatenate([timed.us for timed in sets])
    out = held_out(len(us))

    def predict(efficiency: float, rows: Mask) -> Floats:
        form = replace(h100, gpu=find_gpu("gh200-96gb"), efficiency=efficiency)
        return np.concatenate([_sum_us(form, timed) for timed in sets])[rows]

    bounds = {"efficiency": BOUNDS["efficiency"]}
    half = fit(partial(predict, rows=~out), us[~out], bounds)
    errors = Errors.of(predict(**half, rows=out), us[out])
    known = "3.8/11.7 forward, 5.9/19.8 backward (H100's figures, one scale each)"
    result.rows.append(Row("gemm", "gh200", "ett linears forward and backward, E only", "held out", errors, known))
    whole = fit(partial(predict, rows=np.ones(len(us), bool)), us, bounds)
    rate = Figure(
        significant(whole["efficiency"]), "published", "ett, linears of transformers, fp16", f"{errors} held out"
    )
    result.ship("gh200", {f"{SINGLE_SOURCE}gemm.efficiency": rate})
    return rate.value


def _fit_a100_pcie(folder: Path, sxm: GemmForm, result: FamilyFit) -> float:
    """E, c and K0 of A100 PCIe from SimuMax; t0 and eta as the SXM card. Wgrad into fp32 is scored against them."""
    rows = simumax(folder, "a100_pcie", accumulate=False)
    work, us = Products.of(rows), rows.us.to_numpy(float)
    out = held_out(len(us))

    def predict(part: Products, **parameters: float) -> Floats:
        return gemm_ns(replace(sxm, gpu=find_gpu("a100-pcie-80gb"), **parameters), part) / 1e3

    bounds = {name: BOUNDS[name] for name in ("efficiency", "tile_edge_cost", "k_overhead")}
    half = fit(partial(predict, work.where(~out)), us[~out], bounds)
    errors = Errors.of(predict(work.where(out), **half), us[out])
    result.rows.append(Row("gemm", "a100-pcie", "SimuMax forward and dgrad", "held out", errors, "2.9/12.1 in sample"))
    whole = fit(partial(predict, work), us, bounds)
    source, error = "SimuMax A100 PCIe, bf16 forward and dgrad", f"{errors} held out"
    for name in ("tile_edge_cost", "k_overhead"):
        figure = Figure(significant(whole[name]), "published", source, error, SHAPE_SIGMA)
        result.ship("a100-pcie", {f"gemm.{name}": figure})
    rate = Figure(significant(whole["efficiency"]), "published", source, error)
    result.ship("a100-pcie", {f"{SINGLE_SOURCE}gemm.efficiency": rate})
    form = replace(sxm, gpu=find_gpu("a100-pcie-80gb"), **whole)
    _accumulate(folder, result, "a100-pcie", "a100_pcie", form)
    return rate.value


def _score_b200(folder: Path, form: GemmForm, result: FamilyFit) -> float:
    """SimuMax against aiconfigurator's figures; returns E of SimuMax."""
    rows = simumax(folder, "b200_sxm", accumulate=False)
    errors = Errors.of(gemm_ns(form, Products.of(rows)) / 1e3, rows.us)
    result.rows.append(
        Row(
            "gemm",
            "b200-sxm",
            "SimuMax forward and dgrad",
            "other source",
            errors,
            "22.8/29.6 and 22.6/31.0, 0.24 file",
        )
    )
    rate = form.efficiency / errors.scale
    _accumulate(folder, result, "b200-sxm", "b200_sxm", replace(form, efficiency=rate))
    return rate


def _accumulate(folder: Path, result: FamilyFit, profile: str, file_gpu: str, form: GemmForm) -> None:
    """Rate of wgrad added into fp32, over that of the same source's forward and dgrad."""
    rows = simumax(folder, file_gpu, accumulate=True)
    work = Products.of(rows, accumulate=True)
    scale = Errors.of(gemm_ns(form, work) / 1e3, rows.us).scale
    rate = significant(min(1.0, 1 / scale))
    errors = Errors.of(gemm_ns(replace(form, accumulate_rate=rate), work) / 1e3, rows.us)
    result.rows.append(Row("gemm", profile, "SimuMax wgrad into fp32, accumulate_rate", "in sample", errors))
    source = "SimuMax wgrad into fp32 against its forward and dgrad"
    result.ship(profile, {"gemm.accumulate_rate": Figure(rate, "published", source, f"{errors} in sample", 0.02)})


def _shipped(folder: Path, profile: str, found: list[float]) -> dict[str, Figure]:
    """The rate shipped: judged from all sources (rates.py), its sigma their spread around it."""
    shipped = SHIPPED[profile]
    opinions = [*found, *shipped.others]
    if profile in MAXIMUM_RATES:
        rows = read(folder, "mamf")
        row = rows[(rows.gpu == MAXIMUM_RATES[profile]) & (rows.dtype == "bf16")].iloc[0]
        opinions.append(row.max_achievable_tflops / row.spec_tflops)
    sigma = spread(opinions, shipped.value, least=shipped.least_sigma)
    low, high = shipped.range
    fitted = ", ".join(f"{value:.2f}" for value in opinions)
    source = f"{shipped.reason}; sources give {fitted}; range {low:g}-{high:g}; measure it"
    label: Label = "assumed" if shipped.reason.startswith("judged") else "published"
    return {"gemm.efficiency": Figure(shipped.value, label, source, sigma=sigma)}


if __name__ == "__main__":
    main(fit_gemm)
