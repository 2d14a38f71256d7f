"""What the fits of one calibration give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from calibration.fit.evidence import Cloud, Errors, FamilyFit, Floats
from calibration.fit.solve import Bounds, fit
from calibration.measure.points import FigurePoint, TimedPoint
from calibration.own.facts import Facts
from sim.cost.figures import Figure, Figures

LEAST_SIGMA = 0.02
TOLERANCE = 1e-13


@dataclass(slots=True)
class Evidence:
    """What a fit starts from: the device, its points, the figures that stand in for what is not measured, and whether
    times with caches cold or hot count (a CPU's)."""

    facts: Facts
    timed: Sequence[TimedPoint]
    read: Sequence[FigurePoint]
    base: Figures
    source: str
    caches: str = "cold"

    def ns(self, points: Sequence[TimedPoint]) -> Floats:
        return np.array([point.time(self.caches).median_ns for point in points], float)


@dataclass(slots=True)
class OwnFit:
    """Figures by dotted name, errors by entry, plots by family."""

    figures: dict[str, Figure] = field(default_factory=dict)
    errors: dict[str, Errors] = field(default_factory=dict)
    plots: dict[str, FamilyFit] = field(default_factory=dict)

    def ship(
        self, evidence: Evidence, entry: str, values: Mapping[str, float], predicted: Floats, measured: Floats
    ) -> None:
        """Figures `entry.<name>` with what is left between predicted and measured (ns)."""
        errors = Errors.of(predicted, measured)
        self.errors[entry] = errors
        sigma = max(LEAST_SIGMA, round(errors.median, 3))
        text = f"{errors} residual over {errors.count} points"
        for name, value in values.items():
            self.figures[f"{entry}.{name}"] = Figure(value, "measured", evidence.source, text, sigma)

    def plot(self, family: str, title: str, size: Floats, predicted: Floats, measured: Floats, xlabel: str) -> None:
        clouds = self.plots.setdefault(family, FamilyFit(family)).clouds
        clouds.append(Cloud(title, size, measured / 1e3, predicted / 1e3, xlabel))


def fit_some(
    predict: Callable[..., Floats], measured: Floats, bounds: Bounds, known: Mapping[str, float], needed: Sequence[int]
) -> dict[str, float]:
    """Fit as many parameters, in the order of `bounds`, as there are points for: `needed` points for the first, the
    second, ... The others keep what is `known`."""
    free = [name for name, count in zip(bounds, needed) if len(measured) >= count]
    held = {name: value for name, value in known.items() if name in bounds and name not in free}
    limits = {name: _started(bounds[name], known.get(name)) for name in free}
    found = fit(lambda **values: predict(**held, **values), measured, limits, tolerance=TOLERANCE)
    return {**held, **found}


def _started(bound: tuple[float, float, float], known: float | None) -> tuple[float, float, float]:
    """Start from what is known, where the bounds allow it."""
    start, low, high = bound
    return (min(max(known, low * 1.01), high / 1.01) if known else start, low, high)
