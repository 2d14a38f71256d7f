"""What a fit leaves behind: figures for profiles, rows for the error table, points for plots."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from sim.cost.figures import Figure

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
SEED = 20240601
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Errors:
    """|predicted / measured - 1| over `count` points, as fractions; `scale` is the median of measured / predicted."""

    count: int
    median: float
    p90: float
    scale: float

    @classmethod
    def of(cls, predicted: npt.ArrayLike, measured: npt.ArrayLike) -> Errors:
        ratio = np.asarray(measured, float) / np.asarray(predicted, float)
        off = np.abs(1 / ratio - 1)
        return cls(len(off), float(np.median(off)), float(np.quantile(off, 0.9)), float(np.median(ratio)))

    def __str__(self) -> str:
        return f"{100 * self.median:.1f}/{100 * self.p90:.1f} %"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the error table. `kind`: "held out" (same source, points not fitted), "other source" (nothing
    refitted), "in sample". `costs`: what COSTS.md found for the same, "" where it says nothing."""

    family: str
    profile: str
    what: str
    kind: str
    errors: Errors
    costs: str = ""


@dataclass(frozen=True, slots=True)
class Cloud:
    """Points of one plot panel; times in us against a size (FLOPs or bytes)."""

    title: str
    size: Floats
    measured_us: Floats
    predicted_us: Floats
    xlabel: str


@dataclass(slots=True)
class FamilyFit:
    """Result of one script: figures by profile and dotted name, table rows, plot panels."""

    family: str
    figures: dict[str, dict[str, Figure]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    clouds: list[Cloud] = field(default_factory=list)

    def ship(self, profile: str, figures: Mapping[str, Figure]) -> None:
        self.figures.setdefault(profile, {}).update(figures)


def held_out(count: int, seed: int = SEED) -> Mask:
    """A mask that holds out half of `count` points at random, the same at every call."""
    mask = np.zeros(count, bool)
    mask[np.random.default_rng(seed).permutation(count)[: count // 2]] = True
    return mask


def spread(values: npt.ArrayLike, around: float, least: float = 0.03) -> float:
    """Relative sigma: root mean square of log(value / around) over sources, rounded to two places, at least `least`."""
    logs = np.log(np.asarray(values, float) / around)
    return max(least, round(float(np.sqrt(np.mean(logs**2))), 2))


def significant(value: float, digits: int = 3) -> float:
    """`value` rounded to significant digits, so that profiles do not change with the last bits of a fit."""
    return float(f"{value:.{digits}g}")


def data_folder(given: str | None = None) -> Path:
    """Folder of the csv files: as given, else data/kernels of $SIM_SHARED or of shared/ beside the repository."""
    shared = Path(os.environ.get("SIM_SHARED", REPOSITORY.parent / "shared"))
    return Path(given) if given else shared / "data" / "kernels"


@cache
def read(folder: Path, name: str) -> pd.DataFrame:
    """A csv file of the folder, plain or gzipped."""
    plain = folder / f"{name}.csv"
    return pd.read_csv(plain if plain.exists() else folder / f"{name}.csv.gz", low_memory=False)
