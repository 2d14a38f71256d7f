"""Measured against fitted: one PNG per family, one panel per set of points."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from calibration.fit.evidence import Cloud, Errors, FamilyFit

COLUMNS, PANEL_INCHES = 4, (3.6, 2.9)
BAND = 0.1
MOST_POINTS, FEW_POINTS = 900, 100


def draw(result: FamilyFit, folder: Path) -> Path | None:
    """Write `<family>.png`; None where a family has nothing to draw."""
    if not result.clouds:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    columns = min(COLUMNS, len(result.clouds))
    rows = ceil(len(result.clouds) / columns)
    size = (PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", sharey=True)
    for axis, cloud in zip(axes.flat, result.clouds):
        _panel(axis, cloud)
    for axis in axes.flat[len(result.clouds) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("measured / predicted", fontsize=8)
    figure.suptitle(f"{result.family}: measured over predicted time; band ±{BAND:.0%}", fontsize=10)
    path = folder / f"{result.family}.png"
    figure.savefig(path, dpi=70)
    plt.close(figure)
    return path


def _panel(axis: Axes, cloud: Cloud) -> None:
    """Points, a running median over the size, and a band of ten per cent."""
    ratio = cloud.measured_us / cloud.predicted_us
    step = max(1, len(ratio) // MOST_POINTS)
    axis.axhspan(1 - BAND, 1 + BAND, color="0.9", zorder=0)
    axis.axhline(1, color="0.5", linewidth=0.8, zorder=1)
    few = len(ratio) < FEW_POINTS
    size, alpha = (18, 0.7) if few else (5, 0.35)
    axis.scatter(cloud.size[::step], ratio[::step], s=size, alpha=alpha, color="tab:blue", linewidths=0, zorder=2)
    if not few:
        axis.plot(*_running_median(np.asarray(cloud.size), ratio), color="tab:red", linewidth=1.2, zorder=3)
    axis.set(xscale="log", yscale="log", ylim=(0.4, 2.5))
    axis.set_yticks([0.5, 0.7, 1, 1.4, 2], labels=["0.5", "0.7", "1", "1.4", "2"])
    axis.minorticks_off()
    axis.tick_params(labelsize=7)
    axis.set_xlabel(cloud.xlabel, fontsize=7)
    axis.set_title(f"{cloud.title}\n{Errors.of(cloud.predicted_us, cloud.measured_us)}", fontsize=8)


def _running_median(size: np.ndarray, ratio: np.ndarray, bins: int = 16) -> tuple[np.ndarray, np.ndarray]:
    edges = np.unique(np.quantile(size, np.linspace(0, 1, bins + 1)))
    place = np.clip(np.searchsorted(edges, size, side="right") - 1, 0, len(edges) - 2)
    used = [i for i in range(len(edges) - 1) if (place == i).any()]
    centre = [float(np.median(size[place == i])) for i in used]
    return np.array(centre), np.array([float(np.median(ratio[place == i])) for i in used])
