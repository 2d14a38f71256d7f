"""What a figure shows of one strategy, as small arrays: the memory curve by owner over the lanes of the steady step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sim.api import Outcome
from sim.program.program import ALL_GATHER_COPY_IN, COMPUTE, DEVICE_TO_HOST, STREAM_NAMES, Ints, Phase
from sim.program.world import Floats
from sim.report.words import place, short_op
from sim.timeline.clock import host_memory_curve, memory_clock, step_windows
from sim.timeline.lanes import Bools, Lanes, merged, total, without

LANE_NAMES = {
    "device_to_host": "to host", "host_to_device": "from host", "nvme_read": "from drives", "nvme_write": "to drives",
}  # fmt: skip
BINS = 2400
"""Instants that a curve keeps: more than a figure has pixels."""
LANE_BINS, SHADES = 900, 8
"""Instants that a lane keeps, one per pixel of its figure, and the shares of one that are told apart."""
SHORTEST_LANE = 1e-4
"""Of a step: a stream that is busy for less is left out."""
COMMUNICATION, COPY_IN, STALL = "communication", "copy-in", "waits for a copy"
"""Kinds of work that are no phase. A stall: a copy runs, and no kernel computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One stream: for every kind of work (a phase, or what the stream carries) where it runs, as rows [n, 3] of start
    and end in ms and the share of that time (0 to 1) in which it runs; kernels are often shorter than a pixel."""

    name: str
    work: dict[str, Floats]


PLAIN_FIELDS = ("name", "fits", "step_ms", "capacity_bytes", "peak_ms", "peak_bytes", "peak_place", "copy_over_compute")


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
    copy_over_compute: float | None
    """The longest that what a layer saves takes to leave, over the layer's forward; None where nothing leaves so."""
    host: tuple[Floats, Ints] | None
    """Bytes that the rank has in host memory, and when from; None where it is not known."""
    lanes: tuple[Lane, ...]

    @property
    def top_bytes(self) -> int:
        """The highest point of all curves."""
        on_host = 0 if self.host is None else int(self.host[1].max(initial=0))
        return max(self.peak_bytes, int(self.reserved_bytes.max(initial=0)), on_host)


def save_picture(file: BinaryIO, picture: Picture) -> None:
    """As an npz: arrays, and a header in JSON for the rest."""
    arrays: dict[str, Any] = {"times_ms": picture.times_ms, "reserved_bytes": picture.reserved_bytes}
    arrays |= {f"owner {number}": curve for number, curve in enumerate(picture.owners.values())}
    works = [(row, kind, spans) for row, lane in enumerate(picture.lanes) for kind, spans in lane.work.items()]
    arrays |= {f"work {number}": spans for number, (_, _, spans) in enumerate(works)}
    if picture.host is not None:
        arrays |= {"host times_ms": picture.host[0], "host bytes": picture.host[1]}
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
            host=(arrays["host times_ms"], arrays["host bytes"]) if "host bytes" in arrays else None,
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
    peak, copies = outcome.peak, outcome.copies
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
        copy_over_compute=max((layer.over_compute for layer in copies.layers), default=None) if copies else None,
        host=_host_curve(lanes, begin_ns, end_ns),
        lanes=(
            _stages(outcome, ranks, begin_ns, end_ns)
            if len(ranks) > 1
            else stream_lanes(work_of(lanes), begin_ns, end_ns)
        ),
    )


def _host_curve(lanes: Lanes, begin_ns: float, end_ns: float) -> tuple[Floats, Ints] | None:
    """Between two times, with the value at the first; None where nothing is ever there."""
    times_ns, used = host_memory_curve(lanes)
    if not used.any():
        return None
    first, last = np.searchsorted(times_ns, (begin_ns, end_ns), "right").tolist()
    times_ms = (np.clip(times_ns[first:last], begin_ns, end_ns) - begin_ns) * 1e-6
    kept = thinned(times_ms, used[first:last])
    before = used[first - 1 : first] if first else np.zeros(1, np.int64)
    return np.concatenate(([0.0], times_ms[kept])), np.concatenate((before, used[first:last][kept]))


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
    """What ran on the streams, one entry per kernel, collective or copy; `stream` and `phase` as numbers."""

    stream: Ints
    phase: Ints
    is_collective: Bools
    is_copy: Bools
    start_ns: Floats
    end_ns: Floats


def work_of(lanes: Lanes) -> Work:
    """The rows of a rank that take time on a stream."""
    runs = np.flatnonzero(lanes.runs)
    return Work(
        stream=lanes.program.row_stream[runs],
        phase=lanes.phase[runs],
        is_collective=lanes.is_collective[runs],
        is_copy=lanes.is_copy[runs],
        start_ns=lanes.start_ns[runs],
        end_ns=lanes.end_ns[runs],
    )


def stream_lanes(work: Work, begin_ns: float, end_ns: float) -> tuple[Lane, ...]:
    """Lanes of the streams that do anything between two times: compute by phase, others by what they carry."""
    inside = (work.end_ns > begin_ns) & (work.start_ns < end_ns)
    result = []
    for stream, name in enumerate(STREAM_NAMES):
        here = inside & (work.stream == stream)
        if total(merged(work.start_ns[here], work.end_ns[here])) < SHORTEST_LANE * (end_ns - begin_ns):
            continue
        if stream == COMPUTE:
            kernels = here & ~work.is_collective & ~work.is_copy
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
        if stream == COMPUTE and len(stalls := _stalls(work, inside)):
            times[STALL] = _spans_ms(stalls[:, 0], stalls[:, 1], begin_ns, end_ns)
        result.append(Lane(name=LANE_NAMES.get(name, name.replace("_", "-")), work=times))
    return tuple(result)


def _stalls(work: Work, inside: Bools) -> Floats:
    """When a copy runs and no kernel computes."""
    copies, kernels = inside & work.is_copy, inside & ~work.is_copy & (work.stream == COMPUTE)
    copying, computing = (merged(work.start_ns[rows], work.end_ns[rows]) for rows in (copies, kernels))
    return without(copying, computing)


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
    return name if collective or stream >= DEVICE_TO_HOST else COMMUNICATION
