"""Copies between GPU and host: t = t0 + bytes / B from the few sizes published.

python -m calibration.fit.copies [FOLDER] [--plots FOLDER]
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from calibration.fit.command import main
from calibration.fit.evidence import Cloud, Errors, FamilyFit, Floats, Row, read, significant
from calibration.fit.solve import fit
from sim.cost.figures import Figure

BOUNDS = {"fixed_us": (10.0, 0.1, 200.0), "gb_per_s": (20.0, 1.0, 500.0)}
FIXED_US, FIXED_SIGMA = 10.0, 0.7
SIGMA = 0.05
NAMES = {"H2D": "host_to_device", "D2H": "device_to_host"}
LARGE = {
    "v100": ("PCIe 3 x16", "TIGER (PCIe3 GPU, P100 class)", "jdh4/della-gpu-A100"),
    "a100-sxm-80": ("PCIe 4 x16", "A100-PCIE-40GB", "jdh4/della-gpu-A100"),
    "h100-sxm": ("PCIe 5 x16", "nvbandwidth tutorial example", "nvbandwidth, copy engine"),
    "gh200": ("NVLink-C2C", "GH200 480GB/96GB", "KTH study; another unit 346 (NVIDIA/nvbandwidth#23)"),
}
"""Machines whose largest pinned copy gives a profile's bandwidth: link, name in the file, source."""


def predict_us(size_bytes: Floats, fixed_us: float, gb_per_s: float) -> Floats:
    return np.asarray(fixed_us + size_bytes / gb_per_s / 1e3)


def fit_copies(folder: Path) -> FamilyFit:
    """Bandwidths of large pinned copies, and the fixed time that small ones show."""
    result = FamilyFit("copies")
    rows = read(folder, "copies")
    pinned = rows[rows["mode"].str.startswith("pinned")]
    seen = [_fit_sizes(result, pinned, direction) for direction in NAMES]
    for profile, (link, system, source) in LARGE.items():
        mine = pinned[pinned.system == system]
        for direction, name in NAMES.items():
            part = mine[mine.direction == direction]
            if len(part):
                large = part.iloc[int(part.bytes.fillna(np.inf).argmax())]
                figure = Figure(float(large.gbps), "published", f"{link}, pinned, large ({source})", sigma=SIGMA)
                result.ship(profile, {f"copy.{name}_gb_per_s": figure})
    other = result.figures["h100-sxm"]["copy.host_to_device_gb_per_s"].value
    reason = "no copy-engine figure found; as host to device (an SM copy reached 52.8)"
    result.ship("h100-sxm", {"copy.device_to_host_gb_per_s": Figure(other, "assumed", reason, sigma=0.1)})
    fixed = f"shipped at 10 us, +-2x (COSTS.md 4); four sizes on A100 PCIe 4 give {seen[0]:.0f} and {seen[1]:.0f} us"
    for profile in ("a100-sxm-80", "h100-sxm"):
        result.ship(profile, {"copy.fixed_us": Figure(FIXED_US, "assumed", fixed, sigma=FIXED_SIGMA)})
    return result


def _fit_sizes(result: FamilyFit, rows: pd.DataFrame, direction: str) -> float:
    """Fit the four sizes of one machine; returns the fixed time in us."""
    part = rows[(rows.system == "A100-PCIE-40GB") & (rows.direction == direction) & (rows["mode"] == "pinned")]
    size = part.bytes.to_numpy(float)
    us = size / part.gbps.to_numpy(float) / 1e3
    found = fit(lambda fixed_us, gb_per_s: predict_us(size, fixed_us, gb_per_s), us, BOUNDS)
    predicted = predict_us(size, **found)
    what = (
        f"A100 PCIe 4 {direction}: {significant(found['gb_per_s']):g} GB/s + {significant(found['fixed_us'], 2):g} us"
    )
    result.rows.append(Row("copies", "a100-sxm-80", what, "in sample", Errors.of(predicted, us), "not fitted"))
    result.clouds.append(Cloud(f"A100 PCIe 4 {direction}", size, us, predicted, "bytes"))
    return found["fixed_us"]


if __name__ == "__main__":
    main(fit_copies)
