"""Traces that PyTorch's profiler exports (Chrome JSON, Kineto), of a GPU run or of a CPU run; sim writes the same.

Of a GPU run the kernels, copies and collectives count; of a CPU run the operators, each without those inside it.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
from ruamel.yaml import YAML

from sim.program.world import Floats
from sim.timeline.lanes import merged, overlap, total

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
COMMUNICATION = ("all-gather", "reduce-scatter", "all-reduce", "send, receive, all-to-all", "broadcast")
OTHER = "other"
Event = dict[str, Any]


class TraceError(Exception):
    """A file that is no such trace; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank, in microseconds: its length, and what ran in it.

    compute: time in which kernels compute; exposed_communication, exposed_copies: only these run; idle: nothing does.
    families: (number, microseconds) by family; unnamed: microseconds by name of what no family knows.
    """

    length: float
    compute: float
    exposed_communication: float
    exposed_copies: float
    idle: float
    families: dict[str, tuple[int, float]]
    unnamed: dict[str, float]


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The steps of one rank's trace. `device`: "gpu" or "cpu"."""

    rank: int
    device: str
    steps: tuple[Step, ...]
    simulated: bool = False
    """Written by sim: its last step is the steady one."""


def read_traces(path: Path) -> list[RankTrace]:
    """A trace file, or every trace in a folder (one per rank), by rank. Raises TraceError, OSError."""
    if not path.is_dir():
        return [read_trace(path)]
    found = sorted([*path.glob("*.json"), *path.glob("*.json.gz")])
    if not found:
        raise TraceError(f"{path}: no trace (*.json, *.json.gz) in it")
    return sorted((read_trace(file) for file in found), key=lambda trace: trace.rank)


def read_events(path: Path) -> tuple[dict[str, Any], list[Event]]:
    """The trace's document, and its events that have a duration, with times as numbers. Raises TraceError, OSError."""
    document = _document(path)
    events = document.get("traceEvents")
    if not isinstance(events, list):
        raise TraceError(f"{path}: no traceEvents in it: a trace of torch.profiler is expected")
    return document, [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and _is_timed(e)]


def read_trace(path: Path) -> RankTrace:
    """One trace. Raises TraceError, OSError."""
    document, timed = read_events(path)
    on_device = [e for e in timed if e.get("cat") in ON_DEVICE]
    device = "gpu" if on_device else "cpu"
    work = on_device or [e for e in timed if e.get("cat") == "cpu_op"]
    if not work:
        raise TraceError(f"{path}: neither kernels nor operators in it")
    rank = document.get("distributedInfo", {}).get("rank", 0)
    windows = list(_windows(timed, work))
    launched = _operators_of(timed) if on_device else {}
    if device == "cpu":
        work = list(_without_children(work))
    steps = tuple(_step(work, launched, windows, number) for number in range(len(windows)))
    return RankTrace(rank=int(rank), device=device, steps=steps, simulated="simulated_by" in document)


def _document(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    try:
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        document = json.loads(text)
    except (OSError, EOFError, ValueError) as error:
        raise TraceError(f"{path}: not a trace: {error}") from None
    if isinstance(document, list):  # the older form: events alone
        document = {"traceEvents": document}
    if not isinstance(document, dict):
        raise TraceError(f"{path}: not a trace: an object is expected")
    return cast("dict[str, Any]", document)


def _is_timed(event: Event) -> bool:
    try:
        event["ts"], event["dur"] = float(event["ts"]), float(event.get("dur", 0))
    except (KeyError, TypeError, ValueError):
        return False
    return True


def _windows(timed: list[Event], work: list[Event]) -> Iterator[tuple[float, float]]:
    """Begin and end of each ProfilerStep on the host; the whole trace where there is none.

    A step lasts until the next begins, so that what the host does between two is in one of them.
    """
    marks: dict[str, tuple[float, float]] = {}
    for event in timed:
        if event.get("cat") == "user_annotation" and str(event.get("name", "")).startswith("ProfilerStep"):
            marks[event["name"]] = (event["ts"], event["ts"] + event["dur"])
    spans = sorted(marks.values())
    if not spans:
        yield min(e["ts"] for e in work), max(e["ts"] + e["dur"] for e in work)
        return
    for (begin, _), (following, _) in pairwise(spans):
        yield begin, following
    yield spans[-1]


def _operators_of(timed: list[Event]) -> dict[Any, tuple[str, float]]:
    """Per correlation: the innermost operator around the launch (where the trace has operators), and the launch's time."""
    by_external = {
        e["args"]["External id"]: str(e.get("name", ""))
        for e in timed
        if e.get("cat") == "cpu_op" and "External id" in e.get("args", {})
    }
    launches = {}
    for event in timed:
        arguments = event.get("args", {})
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in arguments:
            name = by_external.get(arguments.get("External id"), "")
            launches[arguments["correlation"]] = (name, event["ts"])
    return launches


def _without_children(operators: list[Event]) -> Iterator[Event]:
    """Operators of a CPU run with the time of those inside them taken off."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in operators:
        threads[event.get("tid")].append(event)
    for events in threads.values():
        events.sort(key=lambda e: (e["ts"], -e["dur"]))
        open_events: list[Event] = []
        own = {id(e): e["dur"] for e in events}
        for event in events:
            while open_events and open_events[-1]["ts"] + open_events[-1]["dur"] <= event["ts"]:
                open_events.pop()
            if open_events:
                own[id(open_events[-1])] -= event["dur"]
            open_events.append(event)
        yield from ({**event, "self": max(own[id(event)], 0.0)} for event in events)


def _step(
    work: list[Event], launched: dict[Any, tuple[str, float]], windows: list[tuple[float, float]], number: int
) -> Step:
    begin, end = windows[number]
    families: dict[str, tuple[int, float]] = {}
    unnamed: dict[str, float] = defaultdict(float)
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in work:
        begun, lasted = float(event["ts"]), float(event["dur"])
        operator, issued = launched.get(event.get("args", {}).get("correlation"), ("", begun))
        if not begin <= issued < end:
            continue
        family = family_of((operator, str(event.get("name", ""))))
        time = float(event.get("self", lasted))
        count, sum_so_far = families.get(family, (0, 0.0))
        families[family] = (count + 1, sum_so_far + time)
        if family == OTHER:
            unnamed[str(event.get("name", ""))] += time
        kind = _kind(str(event.get("cat")), family)
        spans[kind].append((begun, begun + lasted))
    compute, communication, copies = (_merged(spans[kind]) for kind in ("compute", "communication", "copy"))
    both = _merged([*spans["compute"], *spans["communication"]])
    busy = _merged([*spans["compute"], *spans["communication"], *spans["copy"]])
    length = end - begin
    return Step(
        length=length,
        compute=total(compute),
        exposed_communication=total(communication) - overlap(communication, compute),
        exposed_copies=total(copies) - overlap(copies, both),
        idle=max(length - total(busy), 0.0),
        families=families,
        unnamed=dict(unnamed),
    )


def _kind(category: str, family: str) -> str:
    if family in COMMUNICATION:
        return "communication"
    return "copy" if family == "copy" and category != "kernel" else "compute"


def _merged(spans: list[tuple[float, float]]) -> Floats:
    if not spans:
        return np.zeros((0, 2))
    starts, ends = np.array(spans).T
    return merged(starts, ends)


def family_of(names: Iterable[str]) -> str:
    """The family of the first name that any knows; "other" if none does."""
    for name in names:
        for family, pattern in _patterns():
            if name and pattern.search(name):
                return family
    return OTHER


@cache
def _patterns() -> list[tuple[str, re.Pattern[str]]]:
    text = files("sim.checks").joinpath("families.yaml").read_text(encoding="utf-8")
    table = YAML(typ="safe", pure=True).load(text)
    return [(family, re.compile("|".join(patterns), re.IGNORECASE)) for family, patterns in table.items()]
