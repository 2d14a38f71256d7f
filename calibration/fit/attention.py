"""Fit of the attention form per kernel generation and head dimension.

    python -m calibration.fit.attention [FOLDER] [--plots FOLDER]

Forward rates come from inference kernels (aiconfigurator) where no training chart exists; flash2 on A100 and H100 from
the charts of the FlashAttention README, which time forward + backward. Both are scored against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from calibration.fit.attention_time import Heads, attention_ns
from calibration.fit.attention_training import fit_training
from calibration.fit.command import main
from calibration.fit.evidence import Cloud, Errors, FamilyFit, Floats, Row, held_out, read, significant, spread
from calibration.fit.solve import fit
from sim.cost.attention import BACKWARD_FLOPS_RATIO, AttentionForm
from sim.cost.figures import SINGLE_SOURCE, Figure
from sim.hardware.catalogue import find_gpu

BOUNDS = {
    "efficiency": (0.5, 0.02, 1.0),
    "fixed_us": (8.0, 0.3, 60.0),
    "bandwidth_efficiency": (0.5, 0.05, 1.5),
    "tail_share": (0.5, 0.01, 1.5),
}
CHART_BOUNDS = {"efficiency": BOUNDS["efficiency"], "bandwidth_efficiency": (0.5, 0.05, 3.0)}
TRAINING_LENGTH, TRAINING_WEIGHT = 1024, 3.0
CHART_TOKENS, CHART_CHANNELS = 16_384, 2_048
MATH_BOUNDS = {
    "efficiency": (0.1, 0.005, 1.0),
    "bandwidth_efficiency": (0.5, 0.05, 1.5),
    "masked_share": (1.5, 0.5, 4.0),
}
MATH_KERNELS = 5
FULL_HEADS = 32
LEAST_SIGMA, CHART_SIGMA = 0.08, 0.12
BACKWARD_RATE_RATIO = 0.83
"""Rate of the backward over that of the forward as shipped; the sources are scored around it."""
Prefill = dict[tuple[str, int], dict[str, float]]
"""Parameters fitted to prefill kernels, by profile and head dimension."""


@dataclass(frozen=True, slots=True)
class Source:
    """One GPU in aiconfigurator: profile, its name there and ours, generation, and errors of COSTS.md 2 by head dim."""

    profile: str
    file_gpu: str
    gpu: str
    generation: str
    head_dims: tuple[int, ...]
    costs: dict[int, str]
    single: tuple[int, ...] = ()
    """Head dims kept beside the figures that ship, which come from charts or training kernels."""


SOURCES = (
    Source("a100-sxm-80", "a100_sxm", "a100-sxm-80gb", "flash2", (128,), {128: "4.3/17.0, all 8.4/32.4"}, (128,)),
    Source(
        "h100-sxm",
        "h100_sxm",
        "h100-sxm-80gb",
        "flash3",
        (64, 128, 192, 256),
        {64: "5.7/25.5, all 7.3/29", 128: "6.1/20.5, all 7.1/24"},
        (64, 128, 192, 256),
    ),
    Source(
        "h200-sxm",
        "h200_sxm",
        "h200-sxm-141gb",
        "flash3",
        (64, 128, 192, 256),
        {64: "6.3/23.7, all 8.2/33", 128: "5.9/17.6, all 7.1/23"},
        (64, 128, 192, 256),
    ),
    Source(
        "b200-sxm",
        "b200_sxm",
        "b200-sxm-180gb",
        "cudnn",
        (64, 128, 256),
        {64: "9.6/26.0, all 12.3/34", 128: "9.1/23.0, all 10.8/28"},
        (128,),
    ),
    Source(
        "gb200",
        "gb200",
        "gb200-186gb",
        "cudnn",
        (64, 128, 256),
        {64: "10.6/25.9, all 12.7/33", 128: "12.9/26.4, all 13.1/28"},
    ),
    Source(
        "l40s",
        "l40s",
        "l40s-48gb",
        "flash2",
        (64, 128, 192, 256),
        {64: "4.8/14.2, all 7/27", 128: "6.2/17.8, all 9/39"},
    ),
)


@dataclass(frozen=True, slots=True)
class Chart:
    """One set of charts of the FlashAttention README: forward and backward together ("fwdbwd") or forward ("fwd")."""

    profile: str
    file_gpu: str
    gpu: str
    generation: str
    implementation: str
    direction: str
    costs: dict[int, str]


CHARTS = (
    Chart(
        "a100-sxm-80",
        "a100_sxm",
        "a100-sxm-80gb",
        "flash2",
        "fa2",
        "fwdbwd",
        {64: "1.0, worst 2.8, in sample", 128: ".6, worst 5.5, in sample"},
    ),
    Chart(
        "h100-sxm",
        "h100_sxm",
        "h100-sxm-80gb",
        "flash2",
        "fa2",
        "fwdbwd",
        {64: "1.3, worst 3.2, in sample", 128: "1.1, worst 4.1, in sample"},
    ),
    Chart(
        "h100-sxm",
        "h100_sxm",
        "h100-sxm-80gb",
        "flash3",
        "fa3",
        "fwd",
        {64: "1.9, worst 8.7, in sample", 128: "1.5, worst 5.9, in sample", 256: "3.5, worst 12.7, in sample"},
    ),
    Chart("a100-sxm-80", "a100_sxm", "a100-sxm-80gb", "math", "standard", "fwdbwd", {64: "", 128: ""}),
    Chart("h100-sxm", "h100_sxm", "h100-sxm-80gb", "math", "standard", "fwdbwd", {64: "", 128: ""}),
)


def form_of(gpu: str, p: dict[str, float]) -> AttentionForm:
    return AttentionForm(
        find_gpu(gpu), p["efficiency"], p["fixed_us"] * 1e3, p["bandwidth_efficiency"], p["tail_share"],
        p.get("backward_rate_ratio", BACKWARD_RATE_RATIO), p.get("masked_share", 0.0),
    )  # fmt: skip


def fit_attention(folder: Path) -> FamilyFit:
    """Rates by generation and head dimension, the backward's ratio, scores against other sources."""
    result = FamilyFit("attention")
    prefill: Prefill = {}
    for source in SOURCES:
        for head_dim in source.head_dims:
            prefill[source.profile, head_dim] = _fit_prefill(folder, source, head_dim, result)
    for chart in CHARTS:
        for head_dim in chart.costs:
            _fit_chart(folder, result, chart, head_dim, prefill)
    _score_simumax(folder, result, prefill)
    hidden = prefill["a100-sxm-80", 128]
    fit_training(folder, result, BACKWARD_RATE_RATIO, hidden["fixed_us"], hidden["tail_share"])
    _backward_ratio(folder, result)
    return result


def _prefill_rows(folder: Path, file_gpu: str, head_dim: int) -> pd.DataFrame:
    """Causal prefill of at least 128 tokens."""
    rows = read(folder, "attention_forward")
    keep = (rows.gpu == file_gpu) & (rows.d == head_dim) & (rows.s >= 128) & ~rows.kernel.str.contains("decode|fa4")
    return rows[keep].reset_index(drop=True).assign(causal=True)


def predict_us(gpu: str, work: Heads, **parameters: float) -> Floats:
    return attention_ns(form_of(gpu, parameters), work) / 1e3


def _fit_prefill(folder: Path, source: Source, head_dim: int, result: FamilyFit) -> dict[str, float]:
    rows = _prefill_rows(folder, source.file_gpu, head_dim)
    work, us, long = Heads.of(rows), rows.us.to_numpy(float), np.asarray(rows.s >= TRAINING_LENGTH)
    weights = np.where(long, TRAINING_WEIGHT, 1.0)
    out = held_out(len(us))
    half = fit(partial(predict_us, source.gpu, work.where(~out)), us[~out], BOUNDS, weights[~out])
    predicted = predict_us(source.gpu, work, **half)
    errors, every = Errors.of(predicted[out & long], us[out & long]), Errors.of(predicted[out], us[out])
    kernel = str(rows.kernel.iloc[0]).removeprefix("vllm_")
    what = f"{kernel} forward, d{head_dim}, s >= 1024 (all s >= 128: {every})"
    result.rows.append(Row("attention", source.profile, what, "held out", errors, source.costs.get(head_dim, "")))
    if head_dim == 128:
        title, shown = f"{source.profile} {kernel} d128, held out", out & long
        result.clouds.append(Cloud(title, work.flops[shown], us[shown], predicted[shown], "FLOPs"))
    whole = fit(partial(predict_us, source.gpu, work), us, BOUNDS, weights)
    origin = f"aiconfigurator {rows.src.iloc[0].replace('-', ' ')}, {kernel}, causal prefill"
    prefix = (SINGLE_SOURCE if head_dim in source.single else "") + f"attention.{source.generation}.d{head_dim}"
    result.ship(source.profile, {
        f"{prefix}.{name}": Figure(significant(value), "published", origin, f"{errors} held out, s >= 1024", 0.12)
        for name, value in whole.items()
    })  # fmt: skip
    return {name: significant(value) for name, value in whole.items()}


def _chart_rows(folder: Path, chart: Chart, head_dim: int, direction: str) -> tuple[Heads, Floats]:
    """Points of a README chart: 16k tokens, 2,048 channels; times of what the chart times, in us."""
    rows = read(folder, "attn_flash_readme")
    mine = (rows.gpu == chart.file_gpu) & (rows.impl == chart.implementation) & (rows.dir == direction)
    rows = rows[mine & (rows.head_dim == head_dim)]
    heads = CHART_CHANNELS // head_dim
    table = pd.DataFrame({"b": CHART_TOKENS / rows.seqlen, "s": rows.seqlen, "h": heads, "hkv": heads, "d": head_dim})
    work = Heads.of(table.assign(causal=rows.causal == 1))
    times = 1.0 if direction == "fwd" else 1 + BACKWARD_FLOPS_RATIO
    return work, np.asarray(work.flops * times / rows.tflops / 1e6)


def chart_us(form: AttentionForm, work: Heads, direction: str) -> Floats:
    """Forward, or forward + backward."""
    ns = attention_ns(form, work)
    return (ns if direction == "fwd" else ns + attention_ns(form, work, backward=True)) / 1e3


def _fit_chart(folder: Path, result: FamilyFit, chart: Chart, head_dim: int, prefill: Prefill) -> None:
    """Rate and bytes from a chart; fixed time and tail, which it hides, from a prefill kernel."""
    work, us = _chart_rows(folder, chart, head_dim, chart.direction)
    hidden, bounds = _hidden(folder, chart, prefill), CHART_BOUNDS
    source = "as A100's prefill; a chart of 16k tokens hides it"
    if chart.generation == "math":
        bounds, source = MATH_BOUNDS, "five kernels, each as long to start as a fused one"
    out = held_out(len(us))

    def predict(part: Heads, **own: float) -> Floats:
        return chart_us(form_of(chart.gpu, {**hidden, **own}), part, chart.direction)

    half = fit(partial(predict, work.where(~out)), us[~out], bounds)
    errors = Errors.of(predict(work.where(out), **half), us[out])
    whole = fit(partial(predict, work), us, bounds)
    fitted = Errors.of(predict(work, **whole), us)
    timed = "forward" if chart.direction == "fwd" else "forward + backward"
    origin = f"FlashAttention README chart, {chart.implementation} {timed}"
    what = f"{origin}, d{head_dim} (in sample {fitted})"
    result.rows.append(Row("attention", chart.profile, what, "held out", errors, chart.costs[head_dim]))
    if head_dim == 128:
        title = f"{chart.profile} {chart.implementation} {timed} d128, chart"
        result.clouds.append(Cloud(title, work.flops, us, predict(work, **whole), "FLOPs of the forward"))
    sigma = _spread_of_sources(folder, result, chart, head_dim, form_of(chart.gpu, {**hidden, **whole}))
    root = f"attention.{chart.generation}.d{head_dim}"
    for name, value in whole.items():
        figure = Figure(significant(value), "published", origin, f"{errors} held out", sigma)
        result.ship(chart.profile, {f"{root}.{name}": figure})
    hidden.pop("backward_rate_ratio", None)
    for name, value in hidden.items():
        result.ship(chart.profile, {f"{root}.{name}": Figure(significant(value), "assumed", source, sigma=0.5)})


def _hidden(folder: Path, chart: Chart, prefill: Prefill) -> dict[str, float]:
    """What a chart does not show: fixed time and tail; for math also the backward's ratio, from H100's two charts."""
    kernel = prefill["a100-sxm-80", 128]
    if chart.generation == "math":
        ratio = significant(chart_ratio(folder, "standard"))
        return {"fixed_us": MATH_KERNELS * kernel["fixed_us"], "tail_share": 0.0, "backward_rate_ratio": ratio}
    return {name: kernel[name] for name in ("fixed_us", "tail_share")}


def _spread_of_sources(folder: Path, result: FamilyFit, chart: Chart, head_dim: int, form: AttentionForm) -> float:
    """Score other sources of the same kernel on the same card; their spread around the chart's rate."""
    scales = []

    def score(what: str, predicted_us: Floats, us: Floats | pd.Series) -> None:
        errors = Errors.of(predicted_us, us)
        result.rows.append(Row("attention", chart.profile, what, "other source", errors))
        scales.append(errors.scale)

    if chart.generation != "math" and (chart.profile, chart.generation) in {(s.profile, s.generation) for s in SOURCES}:
        rows = _prefill_rows(folder, chart.file_gpu, head_dim)
        rows = rows[(rows.s >= TRAINING_LENGTH) & (rows.b * rows.h >= FULL_HEADS)].reset_index(drop=True)
        if len(rows):
            name = f"{chart.generation} d{head_dim}: chart's figures on prefill, s >= 1024, b h >= {FULL_HEADS}"
            score(name, attention_ns(form, Heads.of(rows)) / 1e3, rows.us)
    if chart.generation == "flash2" and chart.profile == "a100-sxm-80" and head_dim == 128:
        for name, work, us in _simumax_rows(folder, "a100_pcie"):
            score(f"A100 PCIe: SimuMax {name}, d128", attention_ns(form, work, name == "backward") / 1e3, us)
    if chart.profile == "h100-sxm" and chart.direction == "fwdbwd":
        work, us = _chart_rows(folder, chart, head_dim, "fwd")
        score(f"{chart.implementation} forward alone, d{head_dim} (README chart)", chart_us(form, work, "fwd"), us)
    return spread(scales, 1.0, LEAST_SIGMA) if scales else CHART_SIGMA


def _simumax_rows(folder: Path, file_gpu: str) -> list[tuple[str, Heads, Floats]]:
    """Causal training attention at head_dim 128 with at least 32 heads: forward, backward."""
    rows = read(folder, "attn_simumax")
    rows = rows[(rows.gpu == file_gpu) & (rows.dqk == 128) & (rows.dv == 128) & (rows.h >= 32) & rows.contiguous]
    found = []
    for direction, times, name in (("fwd", 1.0, "forward"), ("bwd", BACKWARD_FLOPS_RATIO, "backward")):
        part = rows[rows.dir == direction].reset_index(drop=True)
        work = Heads.of(part.rename(columns={"dqk": "d"}).assign(causal=True))
        us = times * work.flops / (part.eff_full / 2 * part.peak_tflops) / 1e6
        found.append((name, work, np.asarray(us)))
    return found


def _score_simumax(folder: Path, result: FamilyFit, prefill: Prefill) -> None:
    form = form_of("b200-sxm-180gb", prefill["b200-sxm", 128])
    for name, work, us in _simumax_rows(folder, "b200_sxm"):
        errors = Errors.of(attention_ns(form, work, name == "backward") / 1e3, us)
        result.rows.append(
            Row("attention", "b200-sxm", f"SimuMax {name}, d128, prefill figures", "other source", errors)
        )


def chart_ratio(folder: Path, implementation: str) -> float:
    """Rate of the backward over that of the forward on H100, from the charts of forward and of both together."""
    rows = read(folder, "attn_flash_readme").query(f"gpu == 'h100_sxm' and impl == '{implementation}'")
    wide = rows.pivot_table(index=["head_dim", "causal", "seqlen"], columns="dir", values="tflops").dropna()
    backward = BACKWARD_FLOPS_RATIO / ((1 + BACKWARD_FLOPS_RATIO) / wide.fwdbwd - 1 / wide.fwd)
    return float(np.median(backward / wide.fwd))


def _backward_ratio(folder: Path, result: FamilyFit) -> None:
    """Rate of the backward over that of the forward, from three sources, around what ships."""
    ratios = {}
    ratios["FlashAttention-2 on H100"] = chart_ratio(folder, "fa2")
    for file_gpu, name in (("a100_pcie", "SimuMax A100"), ("b200_sxm", "SimuMax B200")):
        (_, forward, us), (_, backward, backward_us) = _simumax_rows(folder, file_gpu)
        rates = (np.median(forward.flops / us), np.median(BACKWARD_FLOPS_RATIO * backward.flops / backward_us))
        ratios[name] = float(rates[1] / rates[0])
    ett = read(folder, "operators").query("op == 'flash_atten' and gpu == 'a100_sxm' and fwd_us > 0")
    ratios["ett A100"] = BACKWARD_FLOPS_RATIO / float(np.median(ett.bwd_us / ett.fwd_us))
    sigma = spread(list(ratios.values()), BACKWARD_RATE_RATIO)
    source = "rate of backward over forward: " + ", ".join(f"{name} {value:.2f}" for name, value in ratios.items())
    shared = Figure(BACKWARD_RATE_RATIO, "published", source, sigma=sigma)
    flagged = Figure(
        BACKWARD_RATE_RATIO, "assumed", "no backward of this kernel measured; as FlashAttention-2", sigma=0.1
    )
    for profile in ("a100-sxm-80", "h100-sxm", "l40s"):
        result.ship(profile, {"attention.flash2.backward_rate_ratio": shared})
    ratio, charts = significant(chart_ratio(folder, "standard")), "FlashAttention README, standard attention, H100"
    for profile in ("a100-sxm-80", "h100-sxm"):
        written_out = Figure(ratio, "published", charts, sigma=0.1)
        result.ship(profile, {"attention.math.backward_rate_ratio": written_out})
    result.ship("h100-sxm", {"attention.flash3.backward_rate_ratio": flagged})
    for profile in ("b200-sxm", "gb200"):
        result.ship(profile, {"attention.cudnn.backward_rate_ratio": shared})


if __name__ == "__main__":
    main(fit_attention)
