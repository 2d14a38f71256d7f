"""Fit of collectives inside a node: two protocols per kind and number of ranks; sends.

    python -m calibration.fit.collectives [FOLDER] [--plots FOLDER]

Fitted on every other size, scored on the sizes between, shipped as fitted to all sizes. Bandwidths are capped a little
above the largest bus bandwidth measured.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd

from calibration.fit.command import main
from calibration.fit.evidence import Cloud, Errors, FamilyFit, Floats, Row, read, significant
from calibration.fit.solve import best_fit, fit
from sim.cost.collective import wire_bytes
from sim.cost.figures import Figure

CARDS = {
    "a100-sxm-80": ("a100_sxm", "5.1/16.5", "3.8/12"),
    "h100-sxm": ("h100_sxm", "4.3/12.1", "3.3/8"),
    "h200-sxm": ("h200_sxm", "4.3/12.2", "2.4/7"),
    "b200-sxm": ("b200_sxm", "4.5/15.0", "5.8/24"),
    "gb200": ("gb200", "", ""),
    "l40s": ("l40s", "", ""),
}
"""Profile: name in the file; COSTS.md 5 on all sizes and on wire bytes of 4 MB or more."""
NOT_SHIPPED = ("l40s",)
"""One machine at 1.2-1.7 GB/s, suspiciously low (COSTS.md 5): scored only."""
KINDS = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
}
SCORED = ("all_gather", "reduce_scatter", "all_reduce")
LARGE_BYTES = 4 << 20
LARGE_WEIGHT = 2.0
"""Of a large message, which decides exposed communication."""
CAP = 1.03
STARTS = ((10.0, 0.3, 30.0), (10.0, 0.1, 60.0), (8.0, 0.6, 20.0), (15.0, 0.5, 80.0), (10.0, 0.03, 20.0))
"""Low latency in us, its bandwidth as a part of the largest measured, latency of the bandwidth protocol."""
LEAST_SIGMA, ONE_VERSION_SIGMA = 0.05, 0.15
SENDS = {"a100-sxm-80": ("a100_dgx", "225"), "h100-sxm": ("h100_dgx", "343")}


def predict_us(
    wire: Floats, low_latency_us: float, low_latency_gb_per_s: float, bandwidth_us: float, bandwidth_gb_per_s: float
) -> Floats:
    low = low_latency_us + wire / low_latency_gb_per_s / 1e3
    return np.asarray(np.minimum(low, bandwidth_us + wire / bandwidth_gb_per_s / 1e3))


def fit_collectives(folder: Path) -> FamilyFit:
    """Protocols of every GPU in the file, scores against all-reduces of another source, sends."""
    result = FamilyFit("collectives")
    rows = read(folder, "nccl_aic")
    for profile in CARDS:
        _fit_card(result, profile, rows[rows.gpu == CARDS[profile][0]])
    small = read(folder, "collectives_small")
    for profile, (system, costs) in SENDS.items():
        _score_all_reduce(result, profile, small[small.system == system])
        _fit_send(result, profile, small[small.system == system], costs)
    return result


def _fit_card(result: FamilyFit, profile: str, rows: pd.DataFrame) -> None:
    _, costs, large_costs = CARDS[profile]
    held: list[tuple[Floats, Floats, Floats]] = []
    for group, part in rows.groupby(["op", "n"]):
        op, ranks = cast("tuple[str, int]", group)
        kind = KINDS[op]
        table = part.groupby("bytes").us.agg(["median", "min", "max"]).reset_index()
        wire = np.array([wire_bytes(kind, size, ranks) for size in table.bytes])
        us = table["median"].to_numpy(float)
        out = np.arange(len(us)) % 2 == 1
        half = two_protocols(wire[~out], us[~out])
        predicted = predict_us(wire[out], **half)
        if kind in SCORED:
            held.append((wire[out], us[out], predicted))
        whole = two_protocols(wire, us)
        if profile not in NOT_SHIPPED:
            errors = Errors.of(predicted, us[out])
            ratio = np.asarray(table["max"] / table["min"], float)
            versions = part.nccl.nunique()
            sigma = max(LEAST_SIGMA, round(float(np.median(np.log(ratio[wire >= LARGE_BYTES]))) / 2, 2))
            _ship(
                result,
                profile,
                (kind, ranks, versions),
                whole,
                f"{errors} held out",
                sigma if versions > 1 else ONE_VERSION_SIGMA,
            )
    wire, us, predicted = (np.concatenate(columns) for columns in zip(*held))
    large = wire >= LARGE_BYTES
    what = "all-gather, reduce-scatter, all-reduce, every other size"
    result.rows.append(Row("collectives", profile, what, "held out", Errors.of(predicted, us), costs))
    errors = Errors.of(predicted[large], us[large])
    result.rows.append(
        Row("collectives", profile, "the same, 4 MB or more on the wire", "held out", errors, large_costs)
    )
    result.clouds.append(Cloud(f"{profile} NCCL, sizes not fitted", wire, us, predicted, "bytes on the wire"))


def two_protocols(wire: Floats, us: Floats) -> dict[str, float]:
    top = float((wire / us).max()) / 1e3
    starts = [
        {
            "low_latency_us": (low, 1.0, 100.0),
            "low_latency_gb_per_s": (part * top, 0.003 * top, CAP * top),
            "bandwidth_us": (high, 2.0, 500.0),
            "bandwidth_gb_per_s": (top, 0.2 * top, CAP * top),
        }
        for low, part, high in STARTS
    ]
    found = best_fit(partial(predict_us, wire), us, starts, np.where(wire >= LARGE_BYTES, LARGE_WEIGHT, 1.0))
    if found["low_latency_us"] > found["bandwidth_us"]:  # the two lines are symmetric; names follow latency
        low = (found["bandwidth_us"], found["bandwidth_gb_per_s"])
        high = (found["low_latency_us"], found["low_latency_gb_per_s"])
        found = dict(zip(found, (*low, *high)))
    return found


def _ship(
    result: FamilyFit, profile: str, what: tuple[str, int, int], found: dict[str, float], error: str, sigma: float
) -> None:
    kind, ranks, versions = what
    source = "nccl-tests in aiconfigurator" + (f", median of {versions} NCCL versions" if versions > 1 else "")
    for name, value in found.items():
        figure = Figure(significant(value), "published", source, error, sigma)
        result.ship(profile, {f"collective.{kind}.n{ranks}.{name}": figure})
        if kind == "all_gather":
            like = Figure(figure.value, "assumed", "no measurement found: like all_gather", sigma=0.3)
            result.ship(profile, {f"collective.broadcast.n{ranks}.{name}": like})


def _score_all_reduce(result: FamilyFit, profile: str, rows: pd.DataFrame) -> None:
    """All-reduces of one node in Vidur, 1 to 64 MB, against the figures fitted above."""
    figures = result.figures[profile]
    for ranks in (2, 4, 8):
        part = rows[
            (rows.op == "all_reduce") & (rows.n == ranks) & (rows.dev_per_node == ranks) & (rows.bytes >= 1 << 20)
        ]
        if part.empty:
            continue
        root = f"collective.all_reduce.n{ranks}"
        names = ("low_latency_us", "low_latency_gb_per_s", "bandwidth_us", "bandwidth_gb_per_s")
        wire = np.array([wire_bytes("all_reduce", size, ranks) for size in part.bytes])
        predicted = predict_us(wire, **{name: figures[f"{root}.{name}"].value for name in names})
        what = f"Vidur all-reduce of {ranks}, 1-64 MB"
        result.rows.append(Row("collectives", profile, what, "other source", Errors.of(predicted, part.us)))


def _fit_send(result: FamilyFit, profile: str, rows: pd.DataFrame, costs: str) -> None:
    """Send and receive between two GPUs of a node."""
    part = rows[(rows.op == "send_recv") & (rows.dev_per_node == 2) & (rows.bytes >= LARGE_BYTES)].sort_values("bytes")
    wire, us = part.bytes.to_numpy(float), part.us.to_numpy(float)
    out = np.arange(len(us)) % 2 == 1

    def predict(size: Floats, latency_us: float, gb_per_s: float) -> Floats:
        return np.asarray(latency_us + size / gb_per_s / 1e3)

    bounds = {"latency_us": (10.0, 1.0, 100.0), "gb_per_s": (200.0, 20.0, 900.0)}
    half = fit(partial(predict, wire[~out]), us[~out], bounds)
    errors = Errors.of(predict(wire[out], **half), us[out])
    whole = fit(partial(predict, wire), us, bounds)
    source, error = "Vidur send/recv inside a node, 4-64 MB", f"{errors} held out"
    what = f"Vidur send/recv: {significant(whole['gb_per_s']):g} GB/s + {significant(whole['latency_us']):g} us"
    result.rows.append(Row("collectives", profile, what, "held out", errors, f"{costs} GB/s" if costs else ""))
    result.ship(profile, {
        "p2p.node_gb_per_s": Figure(significant(whole["gb_per_s"]), "published", source, error, 0.1),
        "p2p.node_latency_us": Figure(significant(whole["latency_us"]), "published", source, error, 0.3),
    })  # fmt: skip


if __name__ == "__main__":
    main(fit_collectives)
