"""The profile of one calibration: fitted, and written as a YAML file that `profile: mine.yaml` names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from calibration.fit.plots import draw
from calibration.fit.profiles import figure_lines
from calibration.measure.case import SCENARIO
from calibration.measure.points import FigurePoint, Point, TimedPoint
from calibration.own.facts import Facts, facts_of
from calibration.own.kernels import fit_attention, fit_gemm, fit_memory
from calibration.own.result import Evidence, OwnFit
from calibration.own.transfers import fit_collectives, fit_copies, nodes_of, take_readings
from sim.cost.figures import Figure
from sim.cost.measured import work_to_dict
from sim.cost.own import GROUPS, HOST, MODEL_PROFILE
from sim.cost.profile import load_profile, profile_for
from sim.interop.write import write_text

FITS = (fit_gemm, fit_attention, fit_memory, fit_collectives, fit_copies, take_readings)
IN_OPERATORS = "a CPU's operators are timed with their launch"
CPU_HOST = (
    "launch_us", "event_us", "driver.cuda_malloc_us", "driver.cuda_free_us", "driver.map_us", "driver.unmap_us",
    "driver.cuda_host_alloc_us", "driver.synchronize_us",
)  # fmt: skip
DEVICE_BYTES = "device."
NOTE = "# Written by `python -m sim calibrate`. Name it in a scenario: profile: {name}"


def fit_points(
    info: Mapping[str, Any], points: Sequence[Point], caches: str = "cold", source: str = ""
) -> tuple[Facts, OwnFit]:
    """Figures for the device that `info` describes. `caches`: whether a CPU's cold or hot times count."""
    timed = [point for point in points if isinstance(point, TimedPoint)]
    read = [point for point in points if isinstance(point, FigurePoint)]
    facts = facts_of(info, timed)
    base = profile_for(facts.gpu) if facts.catalogued else load_profile(MODEL_PROFILE)
    source = source or f"measured here: {info['title']}, torch {info['torch']}, {info['date']}"
    evidence = Evidence(facts, timed, read, base.figures, source, caches)
    result = OwnFit()
    if facts.is_cpu:
        result.figures.update(_of_a_cpu())
    for fit in FITS:
        fit(evidence, result)
    return facts, result


def _of_a_cpu() -> dict[str, Figure]:
    """No queue of launches, no driver, no communicator that holds multiprocessors (unless it is read)."""
    host = {f"host.{name}": Figure(0.0, "measured", IN_OPERATORS) for name in CPU_HOST}
    none = Figure(0.0, "assumed", "not measured: nothing runs beside compute")
    return {**host, "overlap.nccl_sms": none, "overlap.slowdown": none, "overlap.copy_share": none}


def profile_text(
    name: str, info: Mapping[str, Any], points: Sequence[Point], facts: Facts, result: OwnFit, caches: str = "cold"
) -> str:
    """The file. What was measured stands under `measured`, exactly; everything else is the fits'."""
    device = dict(facts.entry)
    for point in points:
        if isinstance(point, FigurePoint) and point.figure.startswith(DEVICE_BYTES):
            device[point.figure.removeprefix(DEVICE_BYTES)] = round(point.value)
    errors = {
        entry: {"points": e.count, "median": round(e.median, 4), "p90": round(e.p90, 4)}
        for entry, e in result.errors.items()
    }
    head: dict[str, Any] = {
        "description": f"Measured on {info['title']}, {info['date']}, torch {info['torch']}.",
        "device": device,
        "calibration": {**info, "caches": caches},
    }
    lines = [NOTE.format(name=name), *(f"{key}: {json.dumps(value)}" for key, value in head.items())]
    if errors:
        lines += ["errors:", *(f"  {json.dumps(entry)}: {json.dumps(error)}" for entry, error in errors.items())]
    lines += figure_lines(result.figures, (*GROUPS, HOST))
    measured = list(measured_entries(points, caches))
    if measured:
        lines += ["", "measured:", *(f"  - {json.dumps(entry)}" for entry in measured)]
    return "\n".join(lines) + "\n"


def measured_entries(points: Sequence[Point], caches: str) -> Iterator[dict[str, Any]]:
    """Kernels, copies, and collectives of one node with their times; a scenario's own first, which count where two are
    one work."""
    timed = [point for point in points if isinstance(point, TimedPoint)]
    inside = (point for point in timed if nodes_of(point) == 1)
    for point in sorted(inside, key=lambda point: point.origin != SCENARIO):
        time = point.time(caches)
        spread = round(time.relative_spread, 4)
        yield {"kernel": point.name, **work_to_dict(point.work), "ns": round(time.median_ns), "spread": spread}


def write_profile(
    path: Path, info: Mapping[str, Any], points: Sequence[Point], caches: str = "cold", source: str = ""
) -> OwnFit:
    """Fit, and write the profile and a plot per family beside it (`<name>.plots/`). Raises OSError."""
    facts, result = fit_points(info, points, caches, source)
    write_text(path, profile_text(path.name, info, points, facts, result, caches))
    for family in result.plots.values():
        draw(family, path.with_name(path.stem + ".plots"))
    return result
