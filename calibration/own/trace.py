"""Measured points from a profiler's trace: kernels whose operators say the shapes of their inputs (record_shapes=True).

A kernel belongs to the operator that launched it (by correlation), and that to the outermost operator which is known
here; the times of all its kernels are added. On a CPU the operators' own times count. A trace that sim wrote says the
work of every kernel.
"""

from __future__ import annotations

import datetime
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibration.measure.case import SCENARIO
from calibration.measure.points import Point, TimedPoint
from calibration.measure.timing import Measured
from calibration.measure.words import CalibrationError
from calibration.own.operators import known, work_of
from sim.checks.kineto import Event, TraceError, read_events
from sim.cost.measured import Measurable, WorkError, bare, work_from_dict
from sim.hardware.catalogue import find_gpu, gpu_names
from sim.program.kernels import HostCopy

FAMILY = "trace"
LAUNCHES = ("cuda_runtime", "cuda_driver")
COPIES = {"HtoD": "host_to_device", "DtoH": "device_to_host"}
Found = dict[tuple[str, Measurable], list[float]]
"""Times in ns by the kernel's name and work."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of an operator: `known_as` is the outermost known one around it (itself, if it is one); None: none is."""

    event: Event
    known_as: Event | None


def read_trace_points(path: Path) -> tuple[dict[str, Any], list[Point], list[str]]:
    """The device, points, and remarks on what the trace does not say. Raises CalibrationError, OSError."""
    try:
        document, events = read_events(path)
    except TraceError as error:
        raise CalibrationError(str(error)) from None
    operators = list(_operators(events))
    kernels = [event for event in events if event.get("cat") == "kernel"]
    remarks: list[str] = []
    if any("work" in event.get("args", {}) for event in kernels):
        found = _simulated(kernels)
    elif kernels:
        found = _of_gpu(events, operators, kernels, remarks)
    else:
        found = _of_cpu(operators, remarks)
    found |= _copies(events)
    if not found:
        raise CalibrationError(
            f"{path}: no kernel in it whose shapes are known: profile with torch.profiler.profile(record_shapes=True)"
        )
    info = _device(document, bool(kernels), path)
    return info, [_point(name, work, times) for (name, work), times in found.items()], remarks


def _point(name: str, work: Measurable, times_ns: list[float]) -> TimedPoint:
    return TimedPoint(f"{name} {work}", FAMILY, name, "", SCENARIO, work, Measured.of(times_ns))


def _device(document: Mapping[str, Any], on_gpu: bool, path: Path) -> dict[str, Any]:
    """What the trace says of the device."""
    date = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC).date().isoformat()
    rest = {"torch": "of the trace", "date": date}
    if not on_gpu:
        return {"kind": "cpu", "title": f"CPU of {path.name}", "sms": 1, **rest}
    (device, *_) = [*document.get("deviceProperties", []), {}]
    title = str(device.get("name", f"GPU of {path.name}"))
    catalogued = {find_gpu(name).title: name for name in gpu_names()}
    facts = {"kind": "cuda", "title": title, "sms": int(device.get("numSms", 1)), **rest}
    return {**facts, "gpu": catalogued[title]} if title in catalogued else facts


def _operators(events: Iterable[Event]) -> Iterator[Operator]:
    """Every operator with the outermost known one around it, thread by thread."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            threads[event.get("pid"), event.get("tid")].append(event)
    for calls in threads.values():
        calls.sort(key=lambda e: (e["ts"], -e["dur"]))
        stack: list[tuple[float, Event | None]] = []
        for event in calls:
            while stack and stack[-1][0] <= event["ts"]:
                stack.pop()
            around = stack[-1][1] if stack else None
            known_as = around or (event if known(str(event.get("name", ""))) else None)
            stack.append((event["ts"] + event["dur"], known_as))
            yield Operator(event, known_as)


def _of_gpu(events: Iterable[Event], operators: list[Operator], kernels: list[Event], remarks: list[str]) -> Found:
    by_external = {op.event.get("args", {}).get("External id"): op for op in operators}
    launched_by = {
        event["args"]["correlation"]: by_external.get(event["args"].get("External id"))
        for event in events
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    sums: dict[int, float] = defaultdict(float)
    owners: dict[int, Event] = {}
    unknown: Counter[str] = Counter()
    for event in kernels:
        operator = launched_by.get(event.get("args", {}).get("correlation"))
        if operator is None or operator.known_as is None:
            unknown[operator.event["name"] if operator else str(event.get("name", "")).split("<")[0]] += 1
            continue
        owner = operator.known_as
        owners[id(owner)] = owner
        sums[id(owner)] += event["dur"] * 1e3
    remarks += [f"No shapes are read for {name} ({count} kernels)" for name, count in unknown.most_common(5)]
    return _by_work((owners[number], ns) for number, ns in sums.items())


def _of_cpu(operators: list[Operator], remarks: list[str]) -> Found:
    remarks.append("A CPU's trace: the profiler's own time is in every operator; measuring is more exact")
    return _by_work((op.event, op.event["dur"] * 1e3) for op in operators if op.known_as is op.event)


def _by_work(calls: Iterable[tuple[Event, float]]) -> Found:
    found: Found = defaultdict(list)
    for event, ns in calls:
        named = work_of(str(event["name"]), event.get("args", {}))
        if named is not None and ns > 0:
            found[named].append(ns)
    return dict(found)


def _simulated(kernels: Iterable[Event]) -> Found:
    found: Found = defaultdict(list)
    for event in kernels:
        if "work" in (arguments := event.get("args", {})) and event["dur"] > 0:
            try:
                found[str(event["name"]), bare(work_from_dict(arguments["work"]))].append(event["dur"] * 1e3)
            except WorkError as error:
                raise CalibrationError(f"kernel {event['name']}: {error}") from None
    return dict(found)


def _copies(events: Iterable[Event]) -> Found:
    """Copies between device and host, where the trace says their bytes."""
    found: Found = defaultdict(list)
    for event in events:
        size, name = event.get("args", {}).get("bytes"), str(event.get("name", ""))
        way = next((direction for short, direction in COPIES.items() if short in name), None)
        if event.get("cat") == "gpu_memcpy" and way and isinstance(size, int) and size > 0 and event["dur"] > 0:
            work = HostCopy(way, size, pinned="Pageable" not in name)  # type: ignore[arg-type]
            found["memcpy", work].append(event["dur"] * 1e3)
    return dict(found)
