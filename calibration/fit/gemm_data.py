"""Tables of matrix products by source: which rows are which products, and their times in us."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from calibration.fit.evidence import Floats, read
from calibration.fit.gemm_time import Products

VOCABULARY, VOCABULARY_MULTIPLE = 50257, 128
"""ett pads GPT-2's vocabulary to a multiple of 128 times the tensor-parallel degree, as GPT-NeoX does."""

ETT_SIDES: dict[str, Callable[[pd.DataFrame], tuple[pd.Series, pd.Series]]] = {
    "linear1": lambda r: (r.dim, 3 * r.dim / r.mp),
    "linear2": lambda r: (r.dim / r.mp.fillna(1), r.dim),
    "linear3": lambda r: (r.dim, 4 * r.dim / r.mp),
    "linear4": lambda r: (4 * r.dim / r.mp, r.dim),
    "linear_final": lambda r: (r.dim, padded_vocabulary(r.mp) / r.mp),
}
"""In and out features of estimate-train-time's linears: query-key-value, projection, MLP up, MLP down, logits."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A set of products, or of sums of products, with their times: `parts` are added."""

    name: str
    parts: tuple[Products, ...]
    us: Floats


def padded_vocabulary(mp: pd.Series) -> pd.Series:
    multiple = VOCABULARY_MULTIPLE * mp
    return pd.Series(np.ceil(VOCABULARY / multiple) * multiple)


def aiconfigurator(folder: Path, gpu: str, dtype: str) -> pd.DataFrame:
    """Rows of at least 64 per side; columns m, n, k, us."""
    rows = read(folder, "gemm")
    keep = (rows.gpu == gpu) & (rows.dtype == dtype) & (rows[["m", "n", "k"]].min(axis=1) >= 64)
    return rows[keep].reset_index(drop=True)


TRAINING_WEIGHT = 4.0
"""Of a point in the training region, against the smaller products that fix t0 and eta."""


def training_region(rows: pd.DataFrame) -> np.ndarray:
    """M >= 1024, N and K >= 512: the products of a training step."""
    return np.asarray((rows.m >= 1024) & (rows.n >= 512) & (rows.k >= 512))


def vidur(folder: Path, gpu: str) -> Iterator[Timed]:
    """Projections of real models run eager, fp16."""
    rows = read(folder, "gemm_eager")
    rows = rows[(rows.gpu == gpu) & (rows.m >= 64) & (rows.us > 0)]
    for name, part in (("M >= 1024", rows[rows.m >= 1024]), ("M < 1024", rows[rows.m < 1024])):
        if len(part):
            yield Timed(f"Vidur, eager, {name}", (Products.of(part),), part.us.to_numpy(float))


def ett(folder: Path, gpu: str) -> Iterator[Timed]:
    """Forward, and backward as dgrad + wgrad, of fp16 linears; batched products of attention written out."""
    rows = read(folder, "operators")
    rows = rows[rows.gpu == gpu]
    tables = [_linear(rows[rows.op == op], sides) for op, sides in ETT_SIDES.items() if (rows.op == op).any()]
    if tables:
        t = pd.concat(tables)
        forward = Products.of(t.rename(columns={"tokens": "m", "inner": "k", "outer": "n"}))
        dgrad = Products.of(t.rename(columns={"tokens": "m", "outer": "k", "inner": "n"}))
        wgrad = Products.of(t.rename(columns={"outer": "m", "tokens": "k", "inner": "n"}))
        yield Timed("ett, linears forward", (forward,), t.fwd_us.to_numpy(float))
        yield Timed("ett, linears backward", (dgrad, wgrad), t.bwd_us.to_numpy(float))
    for op, name in (("baddbmm", "Q K^T"), ("bmm", "P V")):
        t = rows[(rows.op == op) & (rows.fwd_us > 0)]
        if len(t):
            yield Timed(f"ett, batched {name}", (_batched(t, op),), t.fwd_us.to_numpy(float))


def _linear(rows: pd.DataFrame, sides: Callable[[pd.DataFrame], tuple[pd.Series, pd.Series]]) -> pd.DataFrame:
    inner, outer = sides(rows)
    table = pd.DataFrame({"tokens": rows.b * rows.l, "inner": inner, "outer": outer})
    return table.assign(fwd_us=rows.fwd_us, bwd_us=rows.bwd_us).query("fwd_us > 0 and bwd_us > 0")


def _batched(rows: pd.DataFrame, op: str) -> Products:
    head_dim = rows.dim / rows.h
    n, k = (rows.l, head_dim) if op == "baddbmm" else (head_dim, rows.l)
    return Products.of(pd.DataFrame({"m": rows.l, "n": n, "k": k, "batch": rows.b * rows.h / rows.mp}))


def simumax(folder: Path, gpu: str, accumulate: bool) -> pd.DataFrame:
    """Rows with columns m, n, k, us: forward (TN) and dgrad (NN), or wgrad (NT) added into fp32."""
    rows = read(folder, "gemm_simumax")
    wanted = (rows.layout == "NT") & (rows.out_dtype == "fp32") if accumulate else rows.layout.isin(["TN", "NN"])
    return rows[(rows.gpu == gpu) & (rows.b == 1) & wanted].reset_index(drop=True)
