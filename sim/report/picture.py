"""What a figure shows of one strategy, as small arrays: the memory curve by owner over the lanes of the steady step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sim.api import Outcome
from sim.program.program import ALL_GATHER_COPY_IN, COMPUTE, STREAM_NAMES, Ints, Phase
from sim.program.world import Floats
from sim.report.words import place, short_op
from sim.timeline.clock import memory_clock, step_windows
from sim.timeline.lanes import Bools, Lanes, merged, total

BINS = 2400
"""Instants that a curve keeps: more than a figure has pixels."""
LANE_BINS, SHADES = 900, 8
"""Instants that a lane keeps, one per pixel of its figure, and the shares of one that are told apart."""
SHORTEST_LANE = 1e-4
"""Of a step: a stream that is busy for less is left out."""
COMMUNICATION, COPY_IN = "communication", "copy-in"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One stream: for every kind of work (a phase, or what the stream carries) where it runs, as rows [n, 3] of start
    and end in ms and the share of that time (0 to 1) in which it runs; kernels are often shorter than a pixel."""

    name: str
    work: dict[str, Floats]


PLAIN_FIELDS = ("name", "fits", "step_ms", "capacity_bytes", "peak_ms", "peak_bytes", "peak_place")


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Times are ms from the start of the steady step, on the device axis; a value holds until the next time.

    Where the strategy does not fit (`fits` false) everything shows what would happen with memory enough.
    """

    name: str
    fits: bool
    step_ms: float
    times_ms: Floats
    owners: dict[str, Ints]
    reserved_bytes: Ints
    capacity_bytes: int
    peak_ms: float
    peak_bytes: int
    peak_place: str
    lanes: tuple[Lane, ...]

    @property
    def top_bytes(self) -> int:
        """The highest point of all curves."""
        return max(self.peak_bytes, int(self.reserved_bytes.max(initial=0)))


def save_picture(file: BinaryIO, picture: Picture) -> None:
    """As an npz: arrays, and a header in JSON for the rest."""
    arrays: dict[str, Any] = {"times_ms": picture.times_ms, "reserved_bytes": picture.reserved_bytes}
    arrays |= {f"owner {number}": curve for number, curve in enumerate(picture.owners.values())}
    works = [(row, kind, spans) for row, lane in enumerate(picture.lanes) for kind, spans in lane.work.items()]
    arrays |= {f"work {number}": spans for number, (_, _, spans) in enumerate(works)}
    header = {name: getattr(picture, name) for name in PLAIN_FIELDS}
    header |= {"owners": list(picture.owners), "lanes": [lane.name for lane in picture.lanes]}
    header |= {"works": [(row, kind) for row, kind, _ in works]}
    np.savez_compressed(file, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)


def load_picture(path: Path) -> Picture:
    """What `save_picture` wrote. Raises OSError, BadZipFile, ValueError or KeyError for another file."""
    with np.load(path, allow_pickle=False) as arrays:
        header = json.loads(arrays["header"].tobytes())
        works = [(row, kind, arrays[f"work {number}"]) for number, (row, kind) in enumerate(header["works"])]
        return Picture(
            **{name: header[name] for name in PLAIN_FIELDS},
            times_ms=arrays["times_ms"],
            owners={name: arrays[f"owner {number}"] for number, name in enumerate(header["owners"])},
            reserved_bytes=arrays["reserved_bytes"],
            lanes=tuple(
                Lane(name=name, work={kind: spans for at, kind, spans in works if at == row})
                for row, name in enumerate(header["lanes"])
            ),
        )


def picture_of(outcome: Outcome, ranks: Sequence[Lanes]) -> Picture:
    """The picture of a strategy: memory of the worst rank over the lanes of all; `ranks` are its `shown_lanes`."""
    memory, lanes = outcome.worst.shown, ranks[outcome.ranks.index(outcome.worst)]
    begin_ns, end_ns = step_windows(lanes)[-1]
    first, last = memory.steps()[-1]
    times_ms = np.maximum((memory_clock(memory, lanes).device_ns[first:last] - begin_ns) * 1e-6, 0.0)
    kept = thinned(times_ms, memory.active_bytes[first:last])
    events = np.concatenate(([max(first - 1, 0)], first + kept))
    peak = outcome.peak
    return Picture(
        name=outcome.name,
        fits=outcome.fits,
        step_ms=(end_ns - begin_ns) * 1e-6,
        times_ms=np.concatenate(([0.0], times_ms[kept])),
        owners={owner.label: curve[events] for owner, curve in memory.owner_curves().items()},
        reserved_bytes=memory.reserved_bytes[events],
        capacity_bytes=outcome.capacity_bytes,
        peak_ms=float(times_ms[peak.event - first]),
        peak_bytes=peak.bytes,
        peak_place=f"{place(peak.phase.name.lower(), peak.path)} ({short_op(peak.operator, peak.phase.name.lower())})",
        lanes=(
            _stages(outcome, ranks, begin_ns, end_ns)
            if len(ranks) > 1
            else stream_lanes(work_of(lanes), begin_ns, end_ns)
        ),
    )


def thinned(times_ms: Floats, total_bytes: Ints) -> Ints:
    """At most two events per bin of time, in order: the one with the largest total, so the peak stays, and the last."""
    if not len(times_ms):
        return np.zeros(0, np.int64)
    span = max(float(times_ms[-1] - times_ms[0]), 1e-9)
    bins = ((times_ms - times_ms[0]) * (BINS / span)).astype(np.int64)
    order = np.lexsort((-total_bytes, bins))
    leads = np.flatnonzero(np.diff(bins[order], prepend=-1))
    last = np.append(np.flatnonzero(np.diff(bins)), len(bins) - 1)
    return np.union1d(order[leads], last)


def _stages(outcome: Outcome, ranks: Sequence[Lanes], begin_ns: float, end_ns: float) -> tuple[Lane, ...]:
    """The compute lane of every pipeline rank."""
    lanes = []
    for rank, times in zip(outcome.ranks, ranks):
        compute = stream_lanes(work_of(times), begin_ns, end_ns)[:1]
        lanes += [Lane(name=rank.name, work=lane.work) for lane in compute]
    return tuple(lanes)


@dataclass(frozen=True, slots=True)
class Work:
    """What ran on the streams, one entry per kernel or collective; `stream` and `phase` as numbers of their enums."""

    stream: Ints
    phase: Ints
    is_collective: Bools
    start_ns: Floats
    end_ns: Floats


def work_of(lanes: Lanes) -> Work:
    """The rows of a rank that take time on a stream."""
    runs = np.flatnonzero(lanes.is_kernel | lanes.is_collective)
    streams = lanes.program.row_stream[runs]
    return Work(streams, lanes.phase[runs], lanes.is_collective[runs], lanes.start_ns[runs], lanes.end_ns[runs])


def stream_lanes(work: Work, begin_ns: float, end_ns: float) -> tuple[Lane, ...]:
    """Lanes of the streams that do anything between two times: compute by phase, others by what they carry."""
    inside = (work.end_ns > begin_ns) & (work.start_ns < end_ns)
    result = []
    for stream, name in enumerate(STREAM_NAMES):
        here = inside & (work.stream == stream)
        if total(merged(work.start_ns[here], work.end_ns[here])) < SHORTEST_LANE * (end_ns - begin_ns):
            continue
        if stream == COMPUTE:
            kernels = here & ~work.is_collective
            kinds = {phase.name.lower(): kernels & (work.phase == phase) for phase in Phase}
            kinds[COMMUNICATION] = here & work.is_collective
        else:
            name = _carries(stream, name, bool(work.is_collective[here].any()))
            kinds = {name: here}
        times = {
            kind: _spans_ms(work.start_ns[rows], work.end_ns[rows], begin_ns, end_ns)
            for kind, rows in kinds.items()
            if rows.any()
        }
        result.append(Lane(name=name.replace("_", "-"), work=times))
    return tuple(result)


def _spans_ms(start_ns: Floats, end_ns: Floats, begin_ns: float, until_ns: float) -> Floats:
    """Where any of them runs between two times, and for which share: bins of about a pixel, joined where alike."""
    spans = merged(start_ns, end_ns)
    if not len(spans):
        return np.zeros((0, 3))
    edges_ns = np.linspace(begin_ns, until_ns, LANE_BINS + 1)
    times, run_ns = spans.ravel(), np.diff(spans, prepend=spans[:, :1], axis=1).ravel().cumsum()
    busy = np.diff(np.interp(edges_ns, times, run_ns)) * LANE_BINS / (until_ns - begin_ns)
    level = np.ceil(np.round(busy * SHADES, 6)).astype(np.int64)
    first = np.flatnonzero(np.diff(level, prepend=-1))
    last = np.append(first[1:], LANE_BINS)
    shown = level[first] > 0
    edges_ms = (edges_ns - begin_ns) * 1e-6
    rows = np.stack((edges_ms[first], edges_ms[last], level[first] / SHADES), axis=1)
    result: Floats = rows[shown]
    return result


def _carries(stream: int, name: str, collective: bool) -> str:
    if stream == ALL_GATHER_COPY_IN:
        return COPY_IN
    return name if collective else COMMUNICATION
