"""Measured points in a file, a JSON object per line; what is in it is not measured again.

The first line is the device. A last line that an interruption cut short is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from calibration.measure.case import Case, Reading, Value
from calibration.measure.timing import Measured
from calibration.measure.words import CalibrationError
from sim.cost.measured import Measurable, WorkError, bare, work_from_dict, work_to_dict

SAME_DEVICE = ("kind", "title", "torch", "threads", "driver", "power_limit_w")
"""Facts in which points of one file must agree."""


@dataclass(frozen=True, slots=True)
class TimedPoint:
    """A piece of work with its times; `hot`: with operands in the cache, on a CPU."""

    key: str
    family: str
    name: str
    variant: str
    origin: str
    work: Measurable
    measured: Measured
    hot: Measured | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def time(self, caches: str = "cold") -> Measured:
        """The times with caches cold (as a step finds them) or hot; they are one where caches do not decide."""
        return self.hot if caches == "hot" and self.hot is not None else self.measured


@dataclass(frozen=True, slots=True)
class FigurePoint:
    """A figure that was read off the device."""

    key: str
    family: str
    figure: str
    value: float
    relative_spread: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)


Point = TimedPoint | FigurePoint


def timed(case: Case, measured: Measured, hot: Measured | None = None, **details: Any) -> TimedPoint:
    return TimedPoint(
        case.key, case.family, case.name, case.variant, case.origin, bare(case.work), measured, hot, details
    )


def read_off(reading: Reading, value: Value) -> FigurePoint:
    details = dict(value.details or {})
    return FigurePoint(reading.key, reading.family, reading.figure, value.value, value.relative_spread, details)


class Points(Protocol):
    """Where points go. Of several ranks the first writes a file, the others only keep step."""

    def __contains__(self, key: str) -> bool: ...

    def add(self, point: Point) -> None: ...


class NoFile:
    """The points of a rank that writes none."""

    def __contains__(self, key: str) -> bool:
        return False

    def add(self, point: Point) -> None:
        """The first rank writes it."""


class PointFile:
    """The file of one calibration, open for more."""

    def __init__(self, path: Path, device: dict[str, Any]) -> None:
        """Raises CalibrationError where the file holds another device's points, or none at all."""
        self.path = path
        self.points: dict[str, Point] = {}
        self.device = device
        if path.exists() and path.stat().st_size:
            known, points, length = _read(path)
            _same_device(path, known, device)
            self.points = {point.key: point for point in points}
            with path.open("r+b") as file:
                file.truncate(length)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"device": device}) + "\n", encoding="utf-8")

    def __contains__(self, key: str) -> bool:
        return key in self.points

    def add(self, point: Point) -> None:
        """Remember a point, on disk before anything else is measured."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_as_dict(point)) + "\n")
        self.points[point.key] = point


def read_points(path: Path) -> tuple[dict[str, Any], list[Point]]:
    """The device and the points of a file. Raises CalibrationError."""
    device, points, _ = _read(path)
    return device, points


def _read(path: Path) -> tuple[dict[str, Any], list[Point], int]:
    """Device, points, and the length in bytes of the lines that are whole."""
    points: list[Point] = []
    device: dict[str, Any] | None = None
    length = 0
    for number, (line, whole) in enumerate(_lines(path), 1):
        try:
            if not whole:
                break
            entry = json.loads(line)
            if device is None:
                device = dict(entry["device"])
            else:
                points.append(_from_dict(entry))
        except (ValueError, KeyError, TypeError, WorkError) as error:
            what = "no point" if device is not None else "no file of points"
            raise CalibrationError(f"{path}: line {number}: {what} of a calibration ({error})") from None
        length += len(line)
    if device is None:
        raise CalibrationError(f"{path}: no device in it: no file of points of a calibration")
    return device, points, length


def _lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    for line in path.read_bytes().splitlines(keepends=True):
        yield line, line.endswith(b"\n")


def _same_device(path: Path, known: dict[str, Any], device: dict[str, Any]) -> None:
    other = [
        f"{fact} {known.get(fact)} there, {device.get(fact)} here"
        for fact in SAME_DEVICE
        if known.get(fact) != device.get(fact)
    ]
    if other:
        raise CalibrationError(
            f"{path}: points of another device or software ({'; '.join(other)}). Name another --out, or remove the file"
        )


def _as_dict(point: Point) -> dict[str, Any]:
    common = {"key": point.key, "family": point.family, **({"details": point.details} if point.details else {})}
    if isinstance(point, FigurePoint):
        return {**common, "figure": point.figure, "value": point.value, "spread": point.relative_spread}
    entry = {**common, "name": point.name, "variant": point.variant, "origin": point.origin}
    entry.update(work=work_to_dict(point.work), times=_times(point.measured))
    return entry if point.hot is None else {**entry, "hot": _times(point.hot)}


def _from_dict(entry: dict[str, Any]) -> Point:
    details = dict(entry.get("details", {}))
    if "figure" in entry:
        return FigurePoint(
            entry["key"], entry["family"], entry["figure"], float(entry["value"]), float(entry["spread"]), details
        )
    hot = Measured(**entry["hot"]) if "hot" in entry else None
    return TimedPoint(
        entry["key"], entry["family"], entry["name"], entry["variant"], entry["origin"], work_from_dict(entry["work"]),
        Measured(**entry["times"]), hot, details,
    )  # fmt: skip


def _times(measured: Measured) -> dict[str, float]:
    return {
        "median_ns": measured.median_ns,
        "p10_ns": measured.p10_ns,
        "p90_ns": measured.p90_ns,
        "rounds": measured.rounds,
    }
