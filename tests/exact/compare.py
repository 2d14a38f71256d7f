"""Is a simulated training run equal to a recorded one? Every allocation, free, address, mark, driver call.

Order of frees between two allocations has no consequence and is not compared: frees are compared as sets.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sim.engine.allocator import AllocatorSettings, CachingAllocator, Driver
from sim.engine.allocator.driver import RANGE_BASE, SEGMENT_BASE
from sim.program.program import Mem, Program
from sim.runtime.train import record_training
from sim.scenario.setup import Setup
from tests.exact.allocator_recordings import load
from tests.exact.recorded_setup import gpt_setup, implementation_setup, llama_setup

DEFAULT_CAPACITY_BYTES = 400 << 30  # record_llama.py names the capacity only where it is another
STATISTICS = ("allocated", "active", "reserved", "requested", "inactive_split")
COUNTERS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
DRIVER_ACTIONS = {
    "S": "segment_alloc", "s": "segment_free", "M": "segment_map", "U": "segment_unmap",
    **{name: name for name in ("segment_alloc", "segment_free", "segment_map", "segment_unmap")},
}  # fmt: skip
ANCHOR_BYTES = 4  # record_llama.py holds one fp32 element to write its labels on

Allocation = tuple[int, int, int]
"""Requested bytes, stream, address."""
DriverCall = tuple[str, int, int, int]
"""Action, address, bytes, stream."""


@dataclass
class Burst:
    """What happens between two allocations, and the allocation that ends it (None at the end of the run).

    Frees are named by number of the allocation, or by address where it was made before the part that is compared.
    Driver calls are a set: those that one allocation causes come in an order without consequence.
    """

    frees: set[int | str] = field(default_factory=set)
    driver: Counter[DriverCall] = field(default_factory=Counter)
    allocation: Allocation | None = None
    failed_bytes: int | None = None


@dataclass
class Run:
    """One run, recorded or simulated; `live_at_start`: (address, bytes, stream) of what lived before the bursts."""

    bursts: list[Burst]
    marks: dict[str, dict[str, list[int]]]
    live_at_start: set[Allocation]
    segments: list[Any] | None
    counters: dict[str, int]
    events: int


@dataclass(frozen=True)
class Comparison:
    name: str
    events: int
    """Allocations, frees, driver calls and marks that the recording holds and that were compared."""
    differences: tuple[str, ...]
    equal_allocations: int
    """Allocations before the first one that differs in size, stream, address, or in what was freed before it."""

    @property
    def equal(self) -> bool:
        return not self.differences


def is_step_recording(path: Path) -> bool:
    """Whole training steps (train_* and Llama), not scripted allocator events: their meta names a vocabulary."""
    import gzip

    with gzip.open(path) as file:
        return b'"V":' in file.read(4096)


def setup_of(meta: dict[str, Any]) -> Setup:
    if "implementation" in meta:
        return implementation_setup(meta)
    return gpt_setup(meta) if "T" in meta else llama_setup(meta)


class _Bursts:
    """Collects events into bursts."""

    def __init__(self, known: dict[int, int | str]) -> None:
        self.names = known  # address of a live block -> its name
        self.bursts = [Burst()]
        self.events = 0

    def allocate(self, size: int, stream: int, address: int) -> None:
        self.bursts[-1].allocation = (size, stream, address)
        self.names[address] = len(self.bursts) - 1
        self.bursts.append(Burst())
        self.events += 1

    def free(self, address: int) -> None:
        self.bursts[-1].frees.add(self.names.pop(address))
        self.events += 1

    def driver(self, action: str, address: int, size: int, stream: int) -> None:
        self.bursts[-1].driver[action, address, size, stream] += 1
        self.events += 1

    def fail(self, size: int) -> None:
        self.bursts[-1].failed_bytes = size
        self.events += 1


def recorded_run(data: dict[str, Any]) -> Run:
    """A file's content as a Run."""
    live = {(address, size, stream) for address, size, stream, _ in data.get("live_at_start", [])}
    collect = _Bursts({address: f"{address:#x}" for address, _, _ in live})
    for event in data["trace"]:
        if isinstance(event, str):
            continue
        action = event[0]
        if action in ("a", "alloc"):
            collect.allocate(event[2], event[3], event[1])
        elif action in (
            "f",
            "r",
            "free_completed",
        ):  # r: the bytes still wait for a stream; their end (c) shows in marks
            collect.free(event[1])
        elif action in DRIVER_ACTIONS:
            collect.driver(DRIVER_ACTIONS[action], *event[1:4])
        elif action == "oom":
            collect.fail(event[2] if len(event) > 2 else event[1])
    marks = {
        mark["name"]: {key: value for name in STATISTICS for key in (name, f"{name}_bytes") if (value := mark.get(key))}
        for mark in data["marks"]
    }
    marks = {name: {key.removesuffix("_bytes"): value for key, value in mark.items()} for name, mark in marks.items()}
    return Run(collect.bursts, marks, live, data.get("segments"), data["meta"]["counters"], collect.events)


class _Simulation:
    """The program of a setup, played on the allocator that the recording ran on."""

    def __init__(self, data: dict[str, Any]) -> None:
        meta = self.meta = data["meta"]
        self.is_gpt = "T" in meta
        self.capacity = meta.get("capacity", DEFAULT_CAPACITY_BYTES)
        self.settings = AllocatorSettings.parse(meta["settings"], meta["torch"])
        self.base = RANGE_BASE if self.settings.expandable_segments else SEGMENT_BASE
        self.from_mark = f"s{meta['steps'] - 2}." if meta.get("last_only") else None

    def run(self) -> Run:
        setup, failed = setup_of(self.meta), None
        while True:
            program = record_training(setup, self.meta["steps"], fail_at=failed)
            self._begin(program)
            refused = self._play(failed)
            if refused is None:
                return self._result()
            failed = refused

    def _begin(self, program: Program) -> None:
        anchors = 0 if self.is_gpt else 1
        self.kind = np.concatenate([np.full(anchors, Mem.ALLOC, np.int64), program.mem_kind])
        self.handle = np.concatenate([np.zeros(anchors, np.int64), program.mem_handle + anchors])
        self.size = np.concatenate([np.full(anchors, ANCHOR_BYTES, np.int64), program.mem_bytes])
        self.stream = np.concatenate([np.zeros(anchors, np.int64), program.mem_stream])
        self.anchors = anchors
        self.program_marks = self._marks_of_script(program)
        self.allocator = CachingAllocator(
            self.settings, self.capacity, version=self.meta["torch"], driver=Driver(self.capacity)
        )
        self.collect = _Bursts({})
        self.marks: dict[str, dict[str, list[int]]] = {}
        self.live_at_start: set[Allocation] = set()
        self.alive: dict[int, Allocation] = {}

    def _marks_of_script(self, program: Program) -> list[tuple[str, int]]:
        """(name, position) of marks. The GPT script deletes the loss before its mark after backward, ours after it."""
        marks = [(mark.name, mark.memory_events + self.anchors) for mark in program.marks]
        if not self.is_gpt:
            return marks
        moved = []
        for i, (name, position) in enumerate(marks):
            limit = marks[i + 1][1] if i + 1 < len(marks) else len(self.kind)
            while ".bwd" in name and position < limit and self.kind[position] == Mem.FREE:
                position += 1
            moved.append((name, position))
        return moved

    def _play(self, failed: int | None) -> int | None:
        """Play all; the number of an allocation that is refused and that the program does not know of yet."""
        done = 0
        for name, position in [*self.program_marks, ("", len(self.kind))]:
            while done < position:
                played, refused = self._play_part(done, position)
                done += played
                if refused is None:
                    continue
                number = int(self.handle[done]) - self.anchors
                if number != failed:
                    return number
                self.collect.fail(refused)
                done += 1
            if name:
                self._mark({"init": "model"}.get(name, name) if self.is_gpt else name)
        return None

    def _play_part(self, start: int, stop: int) -> tuple[int, int | None]:
        part = slice(start, stop)
        result = self.allocator.play(self.kind[part], self.handle[part], self.size[part], self.stream[part])
        calls: dict[int, list[Any]] = {}
        for call in result.driver_calls:
            calls.setdefault(call.event, []).append(call)
        for i in range(result.played + (result.out_of_memory is not None)):
            for call in calls.get(i, ()):
                if call.action != "flush":
                    self.collect.driver(call.action, call.address - self.base, call.size_bytes, call.stream)
            if i == result.played:
                break
            size, stream = int(self.size[start + i]), int(self.stream[start + i])
            address = int(result.address[i]) - self.base
            if self.kind[start + i] == Mem.ALLOC:
                self.collect.allocate(size, stream, address)
                self.alive[address] = (address, size, stream)
            elif self.kind[start + i] == Mem.FREE:
                self.collect.free(address)
                del self.alive[address]
        return result.played, result.out_of_memory.rounded_bytes if result.out_of_memory is not None else None

    def _mark(self, name: str) -> None:
        statistics, values = self.allocator.statistics, {}
        for key in STATISTICS:
            gauge = getattr(statistics, f"{key}_bytes")
            values[key] = [gauge.current[0], gauge.peak[0]]
            gauge.peak[:] = gauge.current
        self.marks[name] = values
        if self.from_mark and name.startswith(self.from_mark):  # the last of these marks begins what is compared
            self.collect = _Bursts({address: f"{address:#x}" for address in self.alive})
            self.live_at_start = set(self.alive.values())

    def _result(self) -> Run:
        statistics = self.allocator.statistics
        letters = {"allocated": "A", "pending": "P", "free": "I"}
        segments = [
            [
                segment.address - self.base, segment.size_bytes, segment.stream, segment.pool,
                [[block.size_bytes, letters[block.state], block.requested_bytes] for block in segment.blocks],
            ]
            for segment in self.allocator.segments()
        ]  # fmt: skip
        counters = {name: getattr(statistics, name) for name in COUNTERS}
        return Run(self.collect.bursts, self.marks, self.live_at_start, segments, counters, self.collect.events)


def simulated_run(data: dict[str, Any]) -> Run:
    """The run that a recording's meta describes, simulated; its marks and events as in the file."""
    return _Simulation(data).run()


def compare(name: str, data: dict[str, Any]) -> Comparison:
    """Simulate what the recording's meta describes and compare everything that the file holds."""
    recorded, simulated = recorded_run(data), simulated_run(data)
    differences = [
        *_compare_start(simulated, recorded),
        *_compare_bursts(simulated.bursts, recorded.bursts),
        *_compare_marks(simulated.marks, recorded.marks),
    ]
    if recorded.segments is not None and simulated.segments != recorded.segments:
        differences.append(f"final layout: {len(simulated.segments or [])} segments, recorded {len(recorded.segments)}")
    for key, value in recorded.counters.items():
        if simulated.counters[key] != value:
            differences.append(f"{key}: {simulated.counters[key]}, recorded {value}")
    equal_allocations = _first(simulated.bursts, recorded.bursts, lambda b: b)
    if equal_allocations is None:
        equal_allocations = len(recorded.bursts) - 1
    return Comparison(name, recorded.events + len(recorded.marks), tuple(differences), equal_allocations)


def compare_file(name: str, path: Path) -> Comparison:
    return compare(name, load(path))


def _compare_start(simulated: Run, recorded: Run) -> list[str]:
    if simulated.live_at_start == recorded.live_at_start:
        return []
    extra = len(simulated.live_at_start - recorded.live_at_start)
    missing = len(recorded.live_at_start - simulated.live_at_start)
    return [f"alive before the last step: {extra} blocks that were not recorded, {missing} missing"]


def _compare_bursts(simulated: list[Burst], recorded: list[Burst]) -> list[str]:
    """The first difference in what was asked for and freed, and the first in addresses and driver calls."""
    differences: list[str] = []
    asked = _first(simulated, recorded, lambda b: (b.frees, b.allocation and b.allocation[:2], b.failed_bytes))
    if asked is not None:
        differences.append(f"allocation {asked}: {_show(simulated, asked)}, recorded {_show(recorded, asked)}")
    placed = _first(simulated, recorded, lambda b: (b.allocation and b.allocation[2], b.driver))
    if placed is not None and placed != asked:
        differences.append(f"address of {placed}: {_show(simulated, placed)}, recorded {_show(recorded, placed)}")
    return differences


def _first(simulated: list[Burst], recorded: list[Burst], key: Any) -> int | None:
    for i in range(min(len(simulated), len(recorded))):
        if key(simulated[i]) != key(recorded[i]):
            return i
    return None if len(simulated) == len(recorded) else min(len(simulated), len(recorded))


def _show(bursts: list[Burst], i: int) -> str:
    if i >= len(bursts):
        return "nothing"
    burst = bursts[i]
    what = "the end" if burst.allocation is None else "{} bytes on stream {} at {:#x}".format(*burst.allocation)
    freed = sorted(map(str, burst.frees))
    calls = f", driver {sorted(burst.driver)}" if burst.driver else ""
    return f"{what} after freeing [{', '.join(freed[:12])}]{calls}"


def _compare_marks(simulated: dict[str, Any], recorded: dict[str, Any]) -> list[str]:
    differences = []
    simulated = {name: values for name, values in simulated.items() if not name.endswith(".end")}  # not in the files
    if list(simulated) != list(recorded):
        differences.append(f"marks: {list(simulated)}, recorded {list(recorded)}")
    for name, values in recorded.items():
        mine = simulated.get(name, {})
        for key, value in values.items():
            if key == "inactive_split":  # its peak depends on the order of frees between two allocations
                value, mine = value[:1], {**mine, key: mine.get(key, [])[:1]}
            if mine and mine[key] != value:
                differences.append(f"mark {name}, {key} [now, peak]: {mine[key]}, recorded {value}")
    return differences
