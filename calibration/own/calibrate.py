"""`python -m sim calibrate`: measure, fit, write; or take the times from a trace."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from calibration.measure.words import NO_TORCH, CalibrationError
from calibration.own.profile import write_profile
from calibration.own.result import OwnFit

LARGEST_ERRORS = 5


def calibrate(
    device: str,
    minutes: float,
    scenario: Path | None = None,
    out: Path | None = None,
    threads: int = 0,
    families: Sequence[str] = (),
) -> tuple[str, bool]:
    """Measure the device and write its profile. Returns what to tell, and whether it was interrupted (then points are
    kept and no profile is written). Raises CalibrationError, ScenarioError, OSError."""
    if importlib.util.find_spec("torch") is None:
        raise CalibrationError(NO_TORCH)
    from calibration.measure import ranks
    from calibration.measure.command import measure_families, points_path, told
    from calibration.measure.device import open_device
    from calibration.measure.families import FAMILIES
    from calibration.measure.points import read_points

    opened = open_device(device, threads)
    path = out or default_path(opened.info().title, device)
    points = points_path(path)
    report = measure_families(opened, families or FAMILIES, points, minutes, scenario)
    if ranks.rank() or report.interrupted:
        return ("" if ranks.rank() else told(report, points)), report.interrupted
    info, found = read_points(points)
    if not found:
        raise CalibrationError(f"{told(report, points)}\nNothing was measured: no profile is written")
    result = write_profile(path, info, found)
    return f"{told(report, points)}\n{summary(path, result)}", False


def end(code: int) -> None:
    """End the processes of several ranks together; returns where there is one alone."""
    from calibration.measure import ranks

    ranks.end(code)


def calibrate_from_trace(trace: Path, out: Path | None = None) -> str:
    """A profile from a profiler's trace. Raises CalibrationError, OSError."""
    from calibration.own.trace import read_trace_points

    info, points, remarks = read_trace_points(trace)
    path = out or trace.with_name(f"{trace.name.split('.')[0]}-measured.yaml")
    source = f"trace {trace.name}: {info['title']}"
    result = write_profile(path, info, points, source=source)
    return "\n".join([f"{len(points)} kernels with shapes in {trace}", *remarks, summary(path, result)])


def default_path(title: str, device: str) -> Path:
    """`h100-sxm-80gb-measured.yaml` here; a device that is in no catalogue by its kind."""
    from calibration.own.facts import catalogue_name

    name = catalogue_name(title) if device == "cuda" else None
    return Path(f"{name or device}-measured.yaml")


def summary(path: Path, result: OwnFit) -> str:
    """Where the profile is and how well its fits hold, the worst first."""
    lines = [f"Profile: {path} (plots in {path.stem}.plots). Use it: profile: {path.name}"]
    worst = sorted(result.errors.items(), key=lambda entry: -entry[1].median)
    lines += [f"  {entry}: {errors} over {errors.count} points" for entry, errors in worst[:LARGEST_ERRORS]]
    if len(worst) > LARGEST_ERRORS:
        lines[0] += f". Residuals, median/p90, the {LARGEST_ERRORS} largest of {len(worst)} (all in the file):"
    return "\n".join(lines)
