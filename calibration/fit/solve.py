"""Robust least squares on logarithms: relative errors count alike at every size, outliers less than squared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy.optimize import least_squares

from calibration.fit.evidence import Floats

OUTLIER_SCALE = 0.02
"""Relative error beyond which a point counts linearly (soft_l1): close to least absolute deviations."""

Bounds = Mapping[str, tuple[float, float, float]]
"""By parameter: where the search starts, and the least and largest value allowed; all positive."""


def fit(
    predict: Callable[..., Floats],
    measured: Floats,
    bounds: Bounds,
    weights: Floats | float = 1.0,
    tolerance: float = 1e-8,
) -> dict[str, float]:
    """Parameters for which `predict(**parameters)` comes nearest to `measured`; the search runs on logarithms.

    A point of weight w counts as w points. `tolerance`: relative change of cost and parameters at which it ends.
    """
    start, low, high = (np.log([b[i] for b in bounds.values()]) for i in range(3))
    roots = np.sqrt(weights)

    def residuals(logs: Floats) -> Floats:
        return np.asarray(np.log(predict(**dict(zip(bounds, np.exp(logs)))) / measured) * roots)

    found = least_squares(
        residuals, start, bounds=(low, high), loss="soft_l1", f_scale=OUTLIER_SCALE, diff_step=1e-4,
        ftol=tolerance, xtol=tolerance, gtol=tolerance,
    )  # fmt: skip
    return dict(zip(bounds, np.exp(found.x).tolist()))


def best_fit(
    predict: Callable[..., Floats],
    measured: Floats,
    starts: Sequence[Bounds],
    weights: Floats | float = 1.0,
    tolerance: float = 1e-8,
) -> dict[str, float]:
    """The best of fits from several starting points, for forms with more than one valley."""
    found = [fit(predict, measured, bounds, weights, tolerance) for bounds in starts]
    return min(found, key=lambda p: float(np.mean(np.abs(np.log(predict(**p) / measured)) * weights)))
