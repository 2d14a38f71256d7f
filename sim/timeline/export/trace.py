"""A Chrome trace as PyTorch's profiler (Kineto) writes it: opens in ui.perfetto.dev and Holistic Trace Analysis.

One process per rank; threads are its host thread and its streams; counters show memory on the device axis. Times are
microseconds.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sim import __version__
from sim.cost.measured import work_to_dict
from sim.program.kernels import Fixed, Kernel, Transfer
from sim.program.program import OPERATOR_MASK, PATH_MASK, PATH_SHIFT, PHASE_SHIFT, STREAM_NAMES, Ints, Row
from sim.program.world import Floats
from sim.timeline.clock import host_clock, memory_clock
from sim.timeline.export.names import category, row_names
from sim.timeline.export.tables import PHASE_NAMES
from sim.timeline.lanes import Lanes
from sim.timeline.memory import MemoryTimeline, step_ranges

HOST_THREAD = 1
STREAM_THREADS = tuple(range(7, 7 + 4 * len(STREAM_NAMES), 4))
"""CUDA's numbers of the streams in STREAM_NAMES: PyTorch's default stream shows as 7, later ones further on."""
COMPRESSION = 3
STEP_PARTS = {
    "fwd": "forward",
    "bwd": "backward",
    "clip": "clip",
    "opt": "optimizer",
    "zero": "zero_grad",
    "data": "data",
}


@dataclass(frozen=True, slots=True)
class Rank:
    """What the trace says about the rank and its device."""

    rank: int
    world_size: int
    device_name: str
    total_memory_bytes: int


def trace_bytes(memory: MemoryTimeline, lanes: Lanes, rank: Rank) -> bytes:
    """The trace, gzip-compressed JSON; the same timelines give the same bytes."""
    events = [*_metadata(rank), *_annotations(lanes, rank), *_work(lanes, rank), *_transfers(lanes, rank)]
    events += _counters(memory, lanes, rank)
    head = {
        "schemaVersion": 1,
        "simulated_by": f"sim {__version__}",
        "deviceProperties": [
            {"id": rank.rank, "name": rank.device_name, "totalGlobalMem": rank.total_memory_bytes},
        ],
        "distributedInfo": {"backend": "nccl", "rank": rank.rank, "world_size": rank.world_size},
        "displayTimeUnit": "ms",
    }
    text = json.dumps(head)[:-1] + ', "traceEvents": [\n' + ",\n".join(events) + "\n]}\n"
    return gzip.compress(text.encode(), COMPRESSION, mtime=0)


def _metadata(rank: Rank) -> Iterator[str]:
    threads = [(HOST_THREAD, "host thread"), *zip(STREAM_THREADS, (f"stream {n}" for n in STREAM_NAMES))]
    pid = rank.rank
    yield _event(ph="M", name="process_name", pid=pid, tid=0, args={"name": f"rank {pid}"})
    for order, (thread, name) in enumerate(threads):
        yield _event(ph="M", name="thread_name", pid=pid, tid=thread, args={"name": name})
        yield _event(ph="M", name="thread_sort_index", pid=pid, tid=thread, args={"sort_index": order})


def _annotations(lanes: Lanes, rank: Rank) -> Iterator[str]:
    """ProfilerStep#n on the host thread, the parts of a step inside."""
    clock = np.concatenate(([0.0], host_clock(lanes)))
    marks = [(mark.name, mark.rows) for mark in lanes.program.marks]
    for number, (first, last) in enumerate(step_ranges(marks, len(lanes.start_ns))):
        yield _annotation(f"ProfilerStep#{number}", clock[first], clock[last], rank)
        begin = first
        for name, end in marks:
            part = STEP_PARTS.get(name.partition(".")[2].rstrip("0123456789"))
            if part is not None and first < end <= last:
                yield _annotation(part, clock[begin], clock[end], rank)
            if first <= end <= last:
                begin = end


def _annotation(name: str, start_ns: float, end_ns: float, rank: Rank) -> str:
    return _event(
        ph="X", cat="user_annotation", name=name, pid=rank.rank, tid=HOST_THREAD,
        ts=_microseconds(start_ns), dur=float(_duration(start_ns, end_ns)), args={},
    )  # fmt: skip


def _work(lanes: Lanes, rank: Rank) -> Iterator[str]:
    """Launches on the host thread and what they launched on the streams, tied by correlation numbers and arrows.

    Sends and receives last as NCCL's kernels do, from when they could begin until all has come.
    """
    program, pid = lanes.program, rank.rank
    rows = np.flatnonzero(lanes.runs | np.isin(program.row_kind, (Row.SEND, Row.RECEIVE)))
    names, numbers = row_names(program, rows)
    quoted, categories = [json.dumps(name) for name in names], [category(name) for name in names]
    works = [*map(_work_argument, program.kernels), ""]
    kernels = np.where(program.row_kind[rows] == Row.LAUNCH, program.row_argument[rows], -1)
    runtime = ["cudaMemcpyAsync" if kind == "gpu_memcpy" else "cudaLaunchKernel" for kind in categories]
    paths, operators = [json.dumps(path) for path in program.paths], [json.dumps(op) for op in program.operators]
    clock = np.concatenate(([0.0], host_clock(lanes)))
    columns = (
        rows, numbers, program.row_stream[rows], clock[rows], lanes.issue_ns[rows], lanes.start_ns[rows],
        lanes.end_ns[rows], program.row_where[rows], kernels,
    )  # fmt: skip
    for row, name, stream, from_ns, issue_ns, start_ns, end_ns, where, kernel in zip(*(c.tolist() for c in columns)):
        tid, issued = STREAM_THREADS[stream], f"{issue_ns / 1e3:.3f}"
        yield (
            f'{{"ph":"X","cat":"cuda_runtime","name":"{runtime[name]}","pid":{pid},"tid":{HOST_THREAD},'
            f'"ts":{from_ns / 1e3:.3f},"dur":{_duration(from_ns, issue_ns)},"args":{{"correlation":{row}}}}}'
        )
        yield (
            f'{{"ph":"X","cat":"{categories[name]}","name":{quoted[name]},"pid":{pid},"tid":{tid},'
            f'"ts":{start_ns / 1e3:.3f},"dur":{_duration(start_ns, end_ns)},"args":{{"stream":{tid},"device":{pid},'
            f'"correlation":{row},"phase":"{PHASE_NAMES[where >> PHASE_SHIFT]}",'
            f'"layer":{paths[where >> PATH_SHIFT & PATH_MASK]},"op":{operators[where & OPERATOR_MASK]}{works[kernel]}}}}}'
        )
        yield f'{{"ph":"s","cat":"ac2g","name":"ac2g","id":{row},"pid":{pid},"tid":{HOST_THREAD},"ts":{issued}}}'
        yield (
            f'{{"ph":"f","bp":"e","cat":"ac2g","name":"ac2g","id":{row},"pid":{pid},"tid":{tid},'
            f'"ts":{start_ns / 1e3:.3f}}}'
        )


def _work_argument(kernel: Kernel) -> str:
    """The kernel's work as `sim.cost.measured` writes it, which `sim calibrate --from-trace` reads; none of a given time."""
    return "" if isinstance(kernel.work, Fixed) else f',"work":{json.dumps(work_to_dict(kernel.work))}'


def _transfers(lanes: Lanes, rank: Rank) -> Iterator[str]:
    """An arrow from every send to the receive of it, by a number that both ranks' files agree on."""
    program = lanes.program
    count: Counter[Transfer] = Counter()
    for row in np.flatnonzero(np.isin(program.row_kind, (Row.SEND, Row.RECEIVE))).tolist():
        transfer = program.transfers[int(program.row_argument[row])]
        count[transfer] += 1
        name = f"{transfer} to rank {transfer.receiver}, {count[transfer]}"
        is_send = program.row_kind[row] == Row.SEND
        time_ns = float(lanes.start_ns[row] if is_send else lanes.end_ns[row])
        ends: dict[str, object] = {} if is_send else {"bp": "e"}
        yield _event(
            ph="s" if is_send else "f", cat="pipeline", name=str(transfer), id=zlib.crc32(name.encode()), pid=rank.rank,
            tid=STREAM_THREADS[int(program.row_stream[row])], ts=_microseconds(time_ns), **ends,
        )  # fmt: skip


def _counters(memory: MemoryTimeline, lanes: Lanes, rank: Rank) -> Iterator[str]:
    """Memory on the device axis: per instant the largest moment and, a nanosecond later, the last one."""
    times = memory_clock(memory, lanes).device_ns
    events, shown_ns = _shown_moments(times, memory.allocated_bytes)
    curves = {owner.label: curve[events].tolist() for owner, curve in memory.owner_curves().items()}
    owners = "{" + ",".join(f"{json.dumps(label)}:%d" for label in curves) + "}"
    totals = zip(shown_ns.tolist(), memory.allocated_bytes[events].tolist(), memory.reserved_bytes[events].tolist())
    for (time_ns, allocated, reserved), by_owner in zip(totals, zip(*curves.values())):
        head = f'{{"ph":"C","pid":{rank.rank},"tid":0,"ts":{time_ns / 1e3:.3f},"name":'
        yield f'{head}"allocated bytes","args":{{"bytes":{allocated}}}}}'
        yield f'{head}"reserved bytes","args":{{"bytes":{reserved}}}}}'
        yield f'{head}"allocated bytes by owner","args":{owners % by_owner}}}'


def _shown_moments(times_ns: Floats, total_bytes: Ints) -> tuple[Ints, Floats]:
    """Events to show, and when: of each instant the one with the largest total, and the last if it is another."""
    if not len(times_ns):
        return np.zeros(0, np.int64), times_ns
    first = np.flatnonzero(np.diff(times_ns, prepend=-1.0) > 0)
    last = np.append(first[1:], len(times_ns)) - 1
    order = np.lexsort((-total_bytes, times_ns))  # by instant, the largest first
    largest = order[first]
    other = last != largest
    events = np.concatenate((largest, last[other]))
    shown_ns = np.concatenate((times_ns[largest], times_ns[last[other]] + 1.0))
    in_time = np.argsort(shown_ns, kind="stable")
    return events[in_time], shown_ns[in_time]


def _event(**fields: object) -> str:
    return json.dumps(fields, separators=(",", ":"))


def _microseconds(time_ns: float) -> float:
    return round(time_ns / 1e3, 3)


def _duration(start_ns: float, end_ns: float) -> str:
    """Between the two times as they are written, so that neighbours touch and parts stay inside."""
    return f"{round(end_ns / 1e3, 3) - round(start_ns / 1e3, 3):.3f}"
