"""What the page shows of one strategy, as plain lists: times in ms from the start of the steady step, sizes in MiB.

Where there is more than a browser draws well, the small is left out or joined, and `detail` says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.api import Outcome, shown_lanes
from sim.program.program import PATH_MASK, PATH_SHIFT, PHASE_SHIFT, STREAM_NAMES, Owner, Phase
from sim.program.world import Floats
from sim.report.page.level import merged_runs
from sim.report.picture import LANE_NAMES, Picture, picture_of
from sim.report.summary import StrategySummary
from sim.report.words import place, short_op
from sim.timeline.clock import memory_clock, step_windows
from sim.timeline.export.names import row_names
from sim.timeline.lanes import Lanes

MOST_STORAGES, MOST_KERNELS = 48_000, 96_000
"""On one page, of all strategies together."""
MIB = 1 << 20

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shown:
    """A strategy, played: its figures, its picture, and the lanes of the rank that the page speaks of."""

    outcome: Outcome
    summary: StrategySummary
    picture: Picture
    lanes: Lanes

    @classmethod
    def of(cls, outcome: Outcome, summary: StrategySummary) -> Shown:
        ranks = shown_lanes(outcome)
        return cls(outcome, summary, picture_of(outcome, ranks), ranks[outcome.ranks.index(outcome.worst)])


def strategy_data(shown: Shown, without_recompute: Picture | None, strategies: int = 1) -> Json:
    """Everything of one strategy of `strategies`; `without_recompute`: of the same set-up with nothing recomputed."""
    picture, lanes = shown.picture, shown.lanes
    begin_ns, end_ns = step_windows(lanes)[-1]
    storages, left_out = _storages(shown, begin_ns, end_ns, MOST_STORAGES // strategies)
    kernels, joined = _kernels(lanes, begin_ns, end_ns, MOST_KERNELS // strategies)
    return {
        "name": picture.name,
        "fits": picture.fits,
        "stepMs": _rounded(picture.step_ms),
        "capacity": _mib(picture.capacity_bytes),
        "peak": {"ms": _rounded(picture.peak_ms), "size": _mib(picture.peak_bytes), "place": picture.peak_place},
        "curve": _curve(picture),
        "plain": None if without_recompute is None else _total(without_recompute),
        "lanes": [
            {"name": lane.name, "work": {kind: _spans(spans) for kind, spans in lane.work.items()}}
            for lane in picture.lanes
        ],
        "isPipeline": len(shown.outcome.ranks) > 1,
        "phases": _phases(lanes, begin_ns, end_ns),
        "storages": storages,
        "kernels": kernels,
        "leftOut": left_out,
        "detail": [
            *([_left_out_text(left_out, len(storages["rows"]))] if left_out else []),
            *([joined] if joined else []),
        ],
    }


def _curve(picture: Picture) -> Json:
    curve: Json = {
        "t": _list(picture.times_ms),
        "owners": {label: _list(sizes / MIB, 1) for label, sizes in picture.owners.items() if sizes.any()},
        "reserved": _list(picture.reserved_bytes / MIB, 1),
    }
    if picture.host is not None:
        curve["host"] = {"t": _list(picture.host[0]), "size": _list(picture.host[1] / MIB, 1)}
    return curve


def _total(picture: Picture) -> Json:
    total = np.sum(list(picture.owners.values()), axis=0)
    return {"t": _list(picture.times_ms), "size": _list(total / MIB, 1), "stepMs": _rounded(picture.step_ms)}


def _spans(spans: Floats) -> list[list[float]]:
    return [[_rounded(start), _rounded(end), round(share, 3)] for start, end, share in spans.tolist()]


def _phases(lanes: Lanes, begin_ns: float, end_ns: float) -> list[list[Any]]:
    """Runs of compute kernels of one phase: [phase, start, end]; runs that are shorter than a 300th are joined."""
    rows = np.flatnonzero(lanes.computes & (lanes.end_ns > begin_ns) & (lanes.start_ns < end_ns))
    rows = rows[np.argsort(lanes.start_ns[rows], kind="stable")]
    found: list[list[Any]] = []
    for phase, start, end in zip(
        lanes.phase[rows].tolist(), lanes.start_ns[rows].tolist(), lanes.end_ns[rows].tolist()
    ):
        name = "backward" if phase == Phase.RECOMPUTE else Phase(phase).name.lower()
        if found and found[-1][0] == name:
            found[-1][2] = _rounded((end - begin_ns) * 1e-6)
        else:
            found.append([name, _rounded((start - begin_ns) * 1e-6), _rounded((end - begin_ns) * 1e-6)])
    least = (end_ns - begin_ns) * 1e-6 / 300
    return [phase for phase in found if phase[2] - phase[1] >= least]


def _left_out_text(count: int, listed: int) -> str:
    return f"The stack lists the {listed:,} largest of {listed + count:,} storages; the others are one grey block."


def _storages(shown: Shown, begin_ns: float, end_ns: float, most: int) -> tuple[Json, int]:
    """Storages that live in the step, in the order of birth: [from, to, size, owner, label]; the largest ones, and how
    many are left out."""
    memory = shown.outcome.worst.shown
    program = memory.program
    times_ms = (memory_clock(memory, shown.lanes).device_ns - begin_ns) * 1e-6
    first, last = memory.steps()[-1]
    handles = np.flatnonzero((memory.born < last) & (memory.died >= first) & (memory.size_bytes > 0))
    sizes = memory.size_bytes[handles]
    if len(handles) > most:
        handles = np.sort(handles[np.argsort(-sizes, kind="stable")[:most]])
    born, died = memory.born[handles], memory.died[handles]
    starts = np.where(born < first, 0.0, np.maximum(times_ms[born], 0.0))
    step_ms = (end_ns - begin_ns) * 1e-6
    ends = np.where(died >= last, step_ms, times_ms[np.minimum(died, memory.played - 1)])
    labels: dict[str, int] = {}
    rows = []
    for handle, start, end in zip(handles.tolist(), starts.tolist(), ends.tolist()):
        phase, path, operator = program.where(int(program.mem_where[memory.born[handle]]))
        name = phase.name.lower()
        said = f"{place(name, path)}: {short_op(operator, name)}" if operator else place(name, path)
        label = labels.setdefault(said, len(labels))
        size = round(int(memory.size_bytes[handle]) / MIB, 3)
        rows.append([_rounded(start), _rounded(end), size, int(program.owners[handle]), label])
    found: Json = {"rows": rows, "labels": list(labels), "owners": [owner.label for owner in Owner]}
    return found, len(sizes) - len(rows)


def _kernels(lanes: Lanes, begin_ns: float, end_ns: float, most: int) -> tuple[Json, str]:
    """What runs under the cursor: [lane, start, length, name, module]; neighbours are joined where there are many."""
    program = lanes.program
    rows = np.flatnonzero(lanes.runs & (lanes.end_ns > begin_ns) & (lanes.start_ns < end_ns))
    names, number = row_names(program, rows)
    where = program.row_where[rows]
    columns = {
        "stream": program.row_stream[rows],
        "start": (lanes.start_ns[rows] - begin_ns) * 1e-6,
        "end": (lanes.end_ns[rows] - begin_ns) * 1e-6,
        "name": number,
        "path": (where >> PATH_SHIFT) & PATH_MASK,
        "phase": where >> PHASE_SHIFT,
    }
    runs, joined = merged_runs(columns, most)
    streams = sorted({int(stream) for stream in program.row_stream[rows]})
    lane_of = {stream: lane for lane, stream in enumerate(streams)}
    used = {path: index for index, path in enumerate(sorted({int(path) for path in runs["path"]}))}
    data = [
        [lane_of[int(stream)], _rounded(start), _rounded(end - start), int(name), used[int(path)], int(count)]
        for stream, start, end, name, path, count in zip(
            runs["stream"], runs["start"], runs["end"], runs["name"], runs["path"], runs["count"]
        )
    ]
    detail = ""
    if joined:
        left = joined - int(runs["count"].sum())
        told = (
            f"{joined - left:,} of {joined:,} kernels are shown, joined to"
            if left
            else f"{joined:,} kernels are joined to"
        )
        rest = "; the shortest are left out" if left else ""
        detail = f"Under the cursor, {told} {len(data):,} runs of one module{rest}."
    lanes_named = [LANE_NAMES.get(STREAM_NAMES[s], STREAM_NAMES[s].replace("_", "-")) for s in streams]
    return {"rows": data, "names": names, "paths": [program.paths[path] for path in used], "lanes": lanes_named}, detail


def _mib(count: int) -> float:
    return round(count / MIB, 1)


def _rounded(value: float) -> float:
    return round(float(value), 4)


def _list(values: Any, digits: int = 4) -> list[float]:
    rounded: list[float] = np.round(values, digits).tolist()
    return rounded
