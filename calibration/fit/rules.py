"""Figures by rule: carried between GPUs with the datasheets' ratios, where nothing was measured.

Each rule is a function from what was fitted to figures by profile; its docstring is the rule.
"""

from __future__ import annotations

from pathlib import Path

from calibration.fit.evidence import FamilyFit, read, significant
from calibration.fit.gemm_fp8 import RATIO_SIGMA, TO_16_BIT
from calibration.fit.given import GIVEN, given_figures, gpu_of
from sim.cost.figures import SINGLE_SOURCE, Figure
from sim.cost.gpu import peak_flops_per_ns, tensor_peak_flops_per_ns

POWER_LIMITS_W = {"h100-sxm-500w": 500, "h100-96gb-hbm2e": 500, "h100-pcie": 350, "h100-nvl": 400}
POWER_SAMPLED_W = 691
"""Median power of the large products in the H200 file, whose limit is 700 W (COSTS.md 1.4)."""
POWER_SIGMA = 0.2
HALF_OF_FLASH2 = ("efficient", "triton")
HALF_SIGMA = 0.25
MISALIGNED_SIGMA = 0.5
MISALIGNED_ROWS, MISALIGNED_ROWS_SIGMA = 3, 0.3

Figures = dict[str, dict[str, Figure]]


def apply_rules(folder: Path, fits: list[FamilyFit]) -> FamilyFit:
    """All rules over what the families' fits ship."""
    fitted: Figures = {}
    for family in fits:
        for profile, figures in family.figures.items():
            fitted.setdefault(profile, {}).update(figures)
    rules = FamilyFit("rules")
    for rule in RULES:
        for profile, figures in rule(folder, fitted).items():
            rules.ship(profile, figures)
    return rules


def power_limited(folder: Path, fitted: Figures) -> Figures:
    """A Hopper card below 700 W: the rate of the power-sampled H200 file, same die, times the ratio of the powers."""
    rate = fitted["h200-sxm"][f"{SINGLE_SOURCE}gemm.efficiency"].value
    peak = peak_flops_per_ns(gpu_of("h200-sxm"), "bf16")
    figures: Figures = {}
    for profile, watts in POWER_LIMITS_W.items():
        value = rate * watts / POWER_SAMPLED_W * peak / peak_flops_per_ns(gpu_of(profile), "bf16")
        source = (
            f"rule: {rate:g} at {POWER_SAMPLED_W} W (aiconfigurator H200, power sampled) x {watts} W; in proportion is "
            "the least that a power limit leaves, maxima of other cards fall with its fourth root; measure it"
        )
        in_8_bit = fitted["h100-sxm"]["gemm.fp8.efficiency"].value * watts / POWER_SAMPLED_W
        same = f"rule: as products in 16 bit, x {watts} W / {POWER_SAMPLED_W} W"
        figures[profile] = {
            "gemm.efficiency": Figure(significant(value), "scaled", source, sigma=POWER_SIGMA),
            "gemm.fp8.efficiency": Figure(significant(in_8_bit), "scaled", same, sigma=POWER_SIGMA),
        }
    return figures


def misaligned(folder: Path, fitted: Figures) -> Figures:
    """Batched 16-bit products whose rows are not 16-byte aligned miss the tensor cores: twice the fp32 rate."""
    figures: Figures = {}
    for profile in GIVEN:
        gpu = gpu_of(profile)
        slowdown = max(1.0, tensor_peak_flops_per_ns(gpu) / (2 * peak_flops_per_ns(gpu, "fp32")))
        source = "rule: tensor peak over twice the fp32 peak (packed 16 bit on CUDA cores); no kernel row found"
        figure = Figure(significant(slowdown, 2), "assumed", source, sigma=MISALIGNED_SIGMA)
        figures[profile] = {"gemm.misaligned_slowdown": figure}
    return figures


def misaligned_rows(folder: Path, fitted: Figures) -> Figures:
    """Single 16-bit products whose rows are not 16-byte aligned keep the tensor cores, with narrower loads."""
    source = (
        "rule: a head whose vocabulary is padded badly takes three times as long (Netflix, Scaling LLM Post-Training, "
        "2026); K of 588 takes 3.5 times as long as 592 on a Hopper card (m87-labs/kestrel#143)"
    )
    figure = Figure(MISALIGNED_ROWS, "assumed", source, sigma=MISALIGNED_ROWS_SIGMA)
    return {profile: {"gemm.misaligned_row_slowdown": figure} for profile in GIVEN}


def accumulating(folder: Path, fitted: Figures) -> Figures:
    """Wgrad added into fp32, where SimuMax has no rows: A100 SXM as A100 PCIe; Hopper between it and B200."""
    a100 = fitted["a100-pcie"]["gemm.accumulate_rate"].value
    b200 = fitted["b200-sxm"]["gemm.accumulate_rate"].value
    name = "gemm.accumulate_rate"
    middle = significant((a100 + b200) / 2)
    return {
        "a100-sxm-80": {name: Figure(a100, "scaled", "as A100 PCIe (SimuMax)", sigma=0.03)},
        "h100-sxm": {
            name: Figure(middle, "scaled", f"between A100 PCIe {a100:g} and B200 {b200:g} (SimuMax)", sigma=0.03)
        },
    }


def half_of_flash2(folder: Path, fitted: Figures) -> Figures:
    """FlashAttention 1 in Triton and xFormers' efficient kernel: half the rate of FlashAttention-2 (COSTS.md 8)."""
    figures: Figures = {}
    for profile in ("a100-sxm-80", "h100-sxm", "l40s"):
        flash2 = {n: f for n, f in fitted[profile].items() if n.startswith("attention.flash2.")}
        for generation in HALF_OF_FLASH2:
            for name, figure in flash2.items():
                halved = name.endswith(("efficiency", "bandwidth_efficiency"))
                value = significant(figure.value / 2) if halved else figure.value
                source = "rule: half of flash2's rate (COSTS.md 8)" if halved else "as flash2"
                own = name.replace(".flash2.", f".{generation}.")
                figures.setdefault(profile, {})[own] = Figure(value, "assumed", source, sigma=HALF_SIGMA)
    return figures


def flash2_on_blackwell(folder: Path, fitted: Figures) -> Figures:
    """flash2 uses instructions of Ampere: per SM as fast on B200 and GB200 as on H100. flash3 is as the card's own."""
    figures: Figures = {}
    h100 = gpu_of("h100-sxm")
    for profile in ("b200-sxm", "gb200"):
        gpu = gpu_of(profile)
        ratio = gpu.sms / h100.sms * peak_flops_per_ns(h100, "bf16") / peak_flops_per_ns(gpu, "bf16")
        mine = figures.setdefault(profile, {})
        for name, figure in fitted["h100-sxm"].items():
            half = any(name.startswith(f"attention.{generation}.d") for generation in ("flash2", *HALF_OF_FLASH2))
            if half and name.endswith(".efficiency"):
                source = f"rule: as H100 per SM ({ratio:.3g} of its fraction of the peak)"
                mine[name] = Figure(significant(figure.value * ratio), "scaled", source, sigma=0.25)
        for generation in HALF_OF_FLASH2:
            for head_dim in (64, 128):
                value = mine[f"attention.flash2.d{head_dim}.efficiency"].value / 2
                own = f"attention.{generation}.d{head_dim}.efficiency"
                mine[own] = Figure(significant(value), "assumed", "rule: half of flash2's rate (COSTS.md 8)", sigma=0.3)
        for name, figure in fitted[profile].items():
            if name.startswith("attention.cudnn.") and name.count(".") == 3:
                own = name.replace(".cudnn.", ".flash3.")
                mine[own] = Figure(figure.value, "assumed", "FlashAttention-3 does not run here: as cudnn", sigma=0.25)
    return figures


BLACKWELL = ("b200-sxm", "b300-sxm", "gb200", "gb300")


def narrow_on_blackwell(folder: Path, fitted: Figures) -> Figures:
    """Products in 8 and 4 bit: the card's rate in 16 bit times Transformer Engine's ratios; shapes cost as in 16 bit."""
    figures: Figures = {}
    for profile in BLACKWELL:
        gpu, own = gpu_of(profile), {**given_figures(profile), **fitted.get(profile, {})}
        base = own if "gemm.tile_edge_cost" in own else fitted[GIVEN[profile]["like"]]
        rate = (own if "gemm.efficiency" in own else fitted[GIVEN[profile]["like"]])["gemm.efficiency"].value
        for dtype, ratio in TO_16_BIT.items():
            value = significant(ratio * rate * peak_flops_per_ns(gpu, "bf16") / peak_flops_per_ns(gpu, dtype))
            source = f"rule: {ratio} times the rate in 16 bit (Transformer Engine's guide to products, B300)"
            mine = figures.setdefault(profile, {})
            mine[f"gemm.{dtype}.efficiency"] = Figure(value, "scaled", source, sigma=RATIO_SIGMA)
            for name in ("tile_edge_cost", "k_overhead", "fixed_us", "bandwidth_efficiency"):
                same = Figure(base[f"gemm.{name}"].value, "assumed", "as products in 16 bit", sigma=RATIO_SIGMA)
                mine[f"gemm.{dtype}.{name}"] = same
    return figures


def amd(folder: Path, fitted: Figures) -> Figures:
    """MI300X: the largest rate that a search found; MI250X the same fraction. Attention lower in proportion."""
    rows = read(folder, "mamf")
    row = rows[(rows.gpu == "MI300X") & (rows.dtype == "bf16")].iloc[0]
    rate = significant(row.max_achievable_tflops / peak_flops_per_ns(gpu_of("mi300x"), "bf16") * 1e3)
    found = f"largest rate found by search, {row.max_achievable_tflops:g} TFLOP/s (stas00/ml-engineering)"
    figures: Figures = {
        "mi300x": {"gemm.efficiency": Figure(rate, "published", found, sigma=0.15)},
        "mi250x": {"gemm.efficiency": Figure(rate, "scaled", f"as MI300X: {found}", sigma=0.3)},
    }
    for profile, base in (("mi300x", "h100-sxm"), ("mi250x", "a100-sxm-80")):
        ratio = rate / fitted[base]["gemm.efficiency"].value
        for name, figure in fitted[base].items():
            if name.startswith("attention.") and name.endswith(".efficiency"):
                source = f"rule: {base} x ratio of the GEMM efficiencies ({ratio:.3g})"
                figures[profile][name] = Figure(significant(figure.value * ratio), "scaled", source, sigma=0.3)
    return figures


def v100_copies(folder: Path, fitted: Figures) -> Figures:
    """V100 SXM and PCIe share PCIe 3."""
    return {"v100-sxm": {n: f for n, f in fitted["v100"].items() if n.startswith("copy.")}}


RULES = (
    power_limited,
    misaligned,
    misaligned_rows,
    accumulating,
    half_of_flash2,
    flash2_on_blackwell,
    narrow_on_blackwell,
    amd,
    v100_copies,
)
