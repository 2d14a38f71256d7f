"""Fit of memory-bound kernels: t = t0 + bytes / (eta BW) per op, then families.

    python -m calibration.fit.memory [FOLDER] [--plots FOLDER]

Bytes are ideal passes over the tensors in 16 bit (COSTS.md 3). A family's eta is the mean of its ops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from calibration.fit.command import main
from calibration.fit.evidence import Cloud, Errors, FamilyFit, Floats, Row, held_out, read, significant, spread
from calibration.fit.solve import fit
from sim.cost.figures import CARRIED_SIGMA, Figure, Label
from sim.hardware.catalogue import find_gpu

BOUNDS = {"eta": (0.6, 0.05, 1.2), "fixed_us": (3.0, 0.01, 60.0)}
KERNEL_FLOOR_US = {"a100-sxm-80": 3.0, "gh200": 2.0, "h100-sxm": 2.0}
"""Shortest kernel that ships: a profiler's times leave out the gap of about 1 us between kernels (COSTS.md 6.1)."""
LONGEST_FIXED_US = 3.0
"""t0 of 5-16 us that fits give looks like a profiler's granularity (COSTS.md 3)."""
SINGLE_OP_SIGMA = 0.15
CARDS = (("a100-sxm-80", "a100_sxm", "a100-sxm-80gb"), ("gh200", "gh200", "gh200-96gb"))


@dataclass(frozen=True, slots=True)
class Op:
    """One op of estimate-train-time: elements of its tensor, ideal passes, and what COSTS.md 3 found on A100, GH200."""

    name: str
    column: str
    passes: int
    elements: Callable[[pd.DataFrame], pd.Series]
    costs: tuple[str, str] = ("", "")


def tokens_by(*factors: str) -> Callable[[pd.DataFrame], pd.Series]:
    return lambda r: r.b * r.l * np.prod([r[f] for f in factors], axis=0)


def scores(r: pd.DataFrame) -> pd.Series:
    return r.b * r.h / r.mp * r.l * r.l


OPS = {
    "residual add": Op("res_add", "fwd_us", 3, tokens_by("dim"), (".6/1.3", "1.6/3.8")),
    "gelu forward": Op("gelu", "fwd_us", 2, lambda r: r.b * r.l * 4 * r.dim / r.mp, (".4/2.3", ".9/3.0")),
    "gelu backward": Op("gelu", "bwd_us", 3, lambda r: r.b * r.l * 4 * r.dim / r.mp, (".8/3.0", ".1/.6")),
    "LayerNorm forward": Op("layernorm", "fwd_us", 2, tokens_by("dim"), ("3.5/14.7", "1.8/4.4")),
    "LayerNorm backward": Op("layernorm", "bwd_us", 3, tokens_by("dim"), ("5.6/15.7", "6.7/32")),
    "softmax forward": Op("softmax", "fwd_us", 2, scores, ("6.5/38 in sample", "17/61 in sample")),
    "softmax backward": Op("softmax", "bwd_us", 3, scores, ("2.6/6 in sample", "7.4/18 in sample")),
    "fused causal softmax forward": Op("ScaledUpperTriangMaskedSoftmax", "fwd_us", 2, scores, ("4.2/18", "5.0/12.4")),
    "fused causal softmax backward": Op("ScaledUpperTriangMaskedSoftmax", "bwd_us", 3, scores, ("4.8/17", "4.5/12.6")),
    "embedding forward": Op("embedding", "fwd_us", 2, tokens_by("dim")),
}
FAMILIES = {
    "elementwise": ("residual add", "gelu forward", "gelu backward"),
    "norm_forward": ("LayerNorm forward",),
    "norm_backward": ("LayerNorm backward",),
    "softmax": ("softmax forward", "softmax backward"),
    "fused_softmax": ("fused causal softmax forward", "fused causal softmax backward"),
    "embedding": ("embedding forward",),
    "copy": ("residual add",),
    "dropout": ("gelu forward",),
}
LIKE = {"reduce": "elementwise", "fill": "copy", "cross_entropy": "softmax"}
"""Families that nobody measured, and the family that each is taken to be like."""
VIDUR = {"add": "residual add", "emb": "embedding forward", "input_layernorm": "LayerNorm forward"}
VIDUR_COSTS = {
    ("add", "a100"): "eta .89",
    ("add", "h100"): "eta 1.04",
    ("input_layernorm", "a100"): "eta .35 (RMSNorm)",
}


def predict_us(gpu: str, size_bytes: Floats, eta: float, fixed_us: float) -> Floats:
    return np.asarray(fixed_us + size_bytes / (eta * find_gpu(gpu).memory_bandwidth_bytes_per_s) * 1e6)


def fit_memory(folder: Path) -> FamilyFit:
    """Eta and t0 per op on A100 and GH200, families for both and for H100, whose die and memory GH200 shares."""
    result = FamilyFit("memory")
    vidur = {card: _fit_vidur(folder, result, *card) for card in (("a100", "a100-sxm-80"), ("h100", "h100-sxm"))}
    for index, (profile, file_gpu, gpu) in enumerate(CARDS):
        found = {}
        for title, op in OPS.items():
            rows = read(folder, "operators")
            rows = rows[(rows.op == op.name) & (rows.gpu == file_gpu) & (rows[op.column] > 0)]
            if op.name == "embedding":
                rows = rows[rows.mp == 1]  # beyond, an all-reduce is part of it
            size = np.asarray(2.0 * op.passes * op.elements(rows), float)
            found[title] = _fit_op(result, (profile, gpu), f"ett {title}", size, rows[op.column], op.costs[index])
        others = vidur["a100", "a100-sxm-80"] if profile == "a100-sxm-80" else {}
        _ship(result, profile, found, others)
    _carry_to_h100(result, vidur["h100", "h100-sxm"]["embedding forward"])
    return result


Found = tuple[float, float, Errors]
"""Eta, t0 in us, held-out errors."""


def _fit_op(result: FamilyFit, card: tuple[str, str], title: str, size: Floats, times: pd.Series, costs: str) -> Found:
    profile, gpu = card
    us, out = times.to_numpy(float), held_out(len(times))
    half = fit(partial(predict_us, gpu, size[~out]), us[~out], BOUNDS)
    predicted = predict_us(gpu, size[out], **half)
    errors = Errors.of(predicted, us[out])
    whole = fit(partial(predict_us, gpu, size), us, BOUNDS)
    eta, fixed_us = significant(whole["eta"], 2), significant(whole["fixed_us"], 2)
    what = f"{title}: eta {eta:g}, t0 {fixed_us:g} us"
    result.rows.append(Row("memory", profile, what, "held out", errors, costs))
    result.clouds.append(Cloud(f"{profile} {title}", size[out], us[out], predicted, "bytes"))
    return eta, fixed_us, errors


def _fit_vidur(folder: Path, result: FamilyFit, file_gpu: str, profile: str) -> dict[str, Found]:
    """Inference kernels of at least 1 MB, by the op that they are another opinion on."""
    gpu = "a100-sxm-80gb" if file_gpu == "a100" else "h100-sxm-80gb"
    rows = read(folder, "elementwise")
    rows = rows[(rows.gpu == file_gpu) & (rows.bytes >= 1 << 20) & (rows.us > 0)]
    found = {}
    for op, title in VIDUR.items():
        part = rows[rows.op == op]
        costs = VIDUR_COSTS.get((op, file_gpu), "")
        name = f"Vidur {op} (inference)"
        found[title] = _fit_op(result, (profile, gpu), name, part.bytes.to_numpy(float), part.us, costs)
    return found


def _ship(result: FamilyFit, profile: str, found: dict[str, Found], others: dict[str, Found]) -> None:
    for family, ops in FAMILIES.items():
        etas = [found[op][0] for op in ops]
        eta = significant(float(np.mean(etas)), 2)
        opinions = [*etas, *(others[op][0] for op in ops if op in others and op != "LayerNorm forward")]
        sigma = spread(opinions, eta, 0.05) if len(opinions) > 1 else SINGLE_OP_SIGMA
        source = f"ett, {', '.join(f'{op} {found[op][0]:g}' for op in ops)}"
        if len(opinions) > len(etas):
            source += f"; Vidur {', '.join(f'{o:g}' for o in opinions[len(etas) :])}"
        error = " and ".join(str(found[op][2]) for op in ops[:2]) + " held out"
        t0 = float(np.median([found[op][1] for op in ops]))
        fixed_us = significant(min(max(t0, KERNEL_FLOOR_US[profile]), LONGEST_FIXED_US), 2)
        reason = f"{t0:.2g} us fitted, kept between the floor of a kernel and {LONGEST_FIXED_US:g} (COSTS.md 3 and 6.1)"
        fixed = Figure(fixed_us, "assumed", reason, sigma=0.5)
        result.ship(profile, {
            f"memory.{family}.bandwidth_efficiency": Figure(eta, "published", source, error, sigma),
            f"memory.{family}.fixed_us": fixed,
        })  # fmt: skip
    for family, model in LIKE.items():
        for name in ("bandwidth_efficiency", "fixed_us"):
            like = result.figures[profile][f"memory.{model}.{name}"]
            figure = Figure(like.value, "assumed", f"no measurement found: like {model}", sigma=0.3)
            result.ship(profile, {f"memory.{family}.{name}": figure})


def _carry_to_h100(result: FamilyFit, embedding: Found) -> None:
    """GH200's shares of bandwidth, labelled scaled; the embedding's own from Vidur, which GH200 takes over too: its own
    rows are erratic."""
    for name, figure in list(result.figures["gh200"].items()):
        sigma = round(float(np.hypot(figure.relative_sigma, CARRIED_SIGMA)), 2)
        label: Label = "assumed" if figure.label == "assumed" else "scaled"
        moved = Figure(figure.value, label, f"as GH200: {figure.source}", sigma=sigma)
        result.ship("h100-sxm", {name: moved})
    eta, _, errors = embedding
    own = Figure(eta, "published", "Vidur emb (inference)", f"{errors} held out", SINGLE_OP_SIGMA)
    result.ship("h100-sxm", {"memory.embedding.bandwidth_efficiency": own})
    for name in ("memory.embedding.bandwidth_efficiency", "memory.embedding.fixed_us"):
        del result.figures["gh200"][name]


if __name__ == "__main__":
    main(fit_memory)
