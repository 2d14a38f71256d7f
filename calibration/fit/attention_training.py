"""Attention kernels as training runs them, forward and backward: SimuMax's figures of Transformer Engine's attention.

Kernels of many heads or long sequences, tens of milliseconds some of them, so that clocks have settled; prefill kernels
of inference servers, a few hundred microseconds each, are up to a quarter faster on B200. Heads of 192 entries in
queries and keys and 128 in values (latent attention) are `d192`; work counts the mean of both, as in the simulation.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from calibration.fit.attention_time import Heads, attention_ns
from calibration.fit.evidence import Errors, FamilyFit, Floats, Row, held_out, read, significant
from calibration.fit.solve import fit
from sim.cost.attention import BACKWARD_FLOPS_RATIO, AttentionForm
from sim.cost.figures import Figure
from sim.hardware.catalogue import Gpu, find_gpu

LEAST_HEAD_TOKENS = 1 << 17
"""Heads times tokens of a kernel that fills the card."""
BOUNDS = {"efficiency": (0.5, 0.02, 1.0)}
FULL_BYTES = 1.0
"""Share of the bandwidth at which queries, keys and values move: they are no bound of these kernels."""
WIDE, NARROW = (192, 128), (128, 128)
WIDE_SIGMA, SCALED_SIGMA = 0.12, 0.2


def fit_training(folder: Path, result: FamilyFit, backward_rate_ratio: float, fixed_us: float, tail: float) -> None:
    """B200's rates for heads of 128 and of 192/128 entries; the second on other cards by the ratio of the two."""
    hidden = (fixed_us, tail, backward_rate_ratio)
    b200, a100 = find_gpu("b200-sxm-180gb"), find_gpu("a100-pcie-80gb")
    rates = {shape: _rate(folder, result, "b200_sxm", b200, shape, hidden) for shape in (NARROW, WIDE)}
    source = "SimuMax, Transformer Engine's attention, forward and backward"
    for (queries, _), (rate, errors) in rates.items():
        name = f"attention.cudnn.d{queries}"
        result.ship("b200-sxm", {
            f"{name}.efficiency": Figure(rate, "published", source, f"{errors} held out", WIDE_SIGMA),
            f"{name}.bandwidth_efficiency": Figure(FULL_BYTES, "assumed", "no bound of long kernels", sigma=0.5),
            f"{name}.fixed_us": Figure(fixed_us, "assumed", "as A100's prefill; long kernels hide it", sigma=0.5),
            f"{name}.tail_share": Figure(tail, "assumed", "as A100's prefill; long kernels hide it", sigma=0.5),
        })  # fmt: skip
    on_a100 = {shape: _rate(folder, None, "a100_pcie", a100, shape, hidden)[0] for shape in (NARROW, WIDE)}
    ratios = {"B200": rates[WIDE][0] / rates[NARROW][0], "A100 PCIe": on_a100[WIDE] / on_a100[NARROW]}
    _carry(result, ratios)


def _rate(
    folder: Path, result: FamilyFit | None, file_gpu: str, gpu: Gpu, shape: tuple[int, int],
    hidden: tuple[float, float, float],
) -> tuple[float, Errors]:  # fmt: skip
    """E over the forward and backward kernels of these heads; errors on the half held out."""
    parts = [_rows(folder, file_gpu, shape, backward) for backward in (False, True)]
    us = np.concatenate([times for _, times in parts])
    fixed_us, tail, ratio = hidden

    def predict(keep: Floats, efficiency: float) -> Floats:
        form = AttentionForm(gpu, efficiency, fixed_us * 1e3, FULL_BYTES, tail, ratio)
        ns = [attention_ns(form, work, backward) for backward, (work, _) in enumerate(parts) if len(work.heads)]
        return np.concatenate(ns)[keep] / 1e3

    out = held_out(len(us))
    half = fit(partial(predict, np.asarray(~out)), us[~out], BOUNDS)
    errors = Errors.of(predict(np.asarray(out), **half), us[out])
    rate = significant(fit(partial(predict, np.ones(len(us), bool)), us, BOUNDS)["efficiency"])
    if result is not None:
        what = f"SimuMax forward and backward, d{shape[0]}" + (f"/{shape[1]}" if shape[0] != shape[1] else "")
        result.rows.append(Row("attention", "b200-sxm", what, "held out", errors))
    return rate, errors


def _rows(folder: Path, file_gpu: str, shape: tuple[int, int], backward: bool) -> tuple[Heads, Floats]:
    rows = read(folder, "attn_simumax")
    mine = (rows.gpu == file_gpu) & (rows.dir == ("bwd" if backward else "fwd")) & rows.contiguous
    mine &= (rows.dqk == shape[0]) & (rows.dv == shape[1]) & (rows.s * rows.h >= LEAST_HEAD_TOKENS)
    rows = pd.DataFrame(rows[mine].reset_index(drop=True))
    work = Heads.of(rows.assign(d=sum(shape) / 2, causal=True))
    times = BACKWARD_FLOPS_RATIO if backward else 1.0
    return work, np.asarray(times * work.flops / (rows.eff_full / 2 * rows.peak_tflops) / 1e6)


def _carry(result: FamilyFit, ratios: dict[str, float]) -> None:
    """Where 192/128 heads were not measured: the rate of 128 entries times the mean ratio of the cards that were."""
    mean = float(np.mean(list(ratios.values())))
    said = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    for profile, generation in (("h100-sxm", "flash3"), ("gb200", "cudnn")):
        for name, figure in list(result.figures[profile].items()):
            root, _, own = name.rpartition(".")
            if root == f"attention.{generation}.d128":
                scaled = own == "efficiency"
                value = significant(figure.value * mean) if scaled else figure.value
                rule = (
                    f"rule: rate of 128 entries x {mean:.2f} (SimuMax: {said})" if scaled else "as heads of 128 entries"
                )
                label = "scaled" if scaled else "assumed"
                result.ship(
                    profile, {f"attention.{generation}.d192.{own}": Figure(value, label, rule, sigma=SCALED_SIGMA)}
                )
