"""Recordings of the real allocator: where they lie, and how one is replayed on the simulated allocator."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sim.engine.allocator import (
    AllocatorSettings,
    Block,
    CachingAllocator,
    Driver,
    OutOfMemory,
    PrivatePool,
    StreamEvent,
)
from sim.engine.allocator.driver import RANGE_BASE, SEGMENT_BASE
from sim.engine.allocator.statistics import Ints
from sim.program.program import Mem

HERE = Path(__file__).parent / "recordings"
STATE_LETTERS = {"allocated": "A", "pending": "P", "free": "I"}
POLICIES = {"bumpup": "rising", "bumpdown": "falling"}


def folders() -> list[Path]:
    """Folders searched: SIM_RECORDINGS if set, else the kept ones and the shared ones where present."""
    if chosen := os.environ.get("SIM_RECORDINGS"):
        return [Path(chosen)]
    shared = Path(os.environ.get("SIM_SHARED", Path(__file__).parents[3] / "shared"))
    return [folder for folder in (HERE, shared / "data" / "allocator") if folder.is_dir()]


def find() -> dict[str, list[tuple[str, Path]]]:
    """(name, file) of every recording found, by what it holds.

    "events": chosen events with everything that was true after each; "step": allocations and frees of a training run
    from its start; "last_step": of its last step only, so that where cached blocks lay before it is not known;
    "awaited": of a run whose frees wait for other streams, so for times that an allocator alone does not know (the
    tests of whole steps play them).
    """
    found: dict[str, list[tuple[str, Path]]] = {"events": [], "step": [], "last_step": [], "awaited": []}
    for folder in folders():
        for path in sorted(folder.rglob("*.json.gz")):
            text = gzip.decompress(path.read_bytes())
            holds = "events" if b'"rows":' in text else "last_step" if b'"live_at_start":' in text else "step"
            if holds == "step" and re.search(rb'\["r", ?\d', text):
                holds = "awaited"
            kept = "kept/" if folder == HERE else ""
            found[holds].append((kept + str(path.relative_to(folder)).removesuffix(".json.gz"), path))
    return found


def load(path: Path) -> dict[str, Any]:
    with gzip.open(path) as file:
        data: dict[str, Any] = json.load(file)
    return data


@dataclass
class Replay:
    """Plays a recording's events on a new allocator."""

    meta: dict[str, Any]
    trace: list[list[Any]] = field(default_factory=list)
    finished: Counter[int] = field(default_factory=Counter)
    blocks: dict[int, Block] = field(default_factory=dict)
    pools: dict[int, PrivatePool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        meta = self.meta
        self.version = meta["torch"]
        self.base = RANGE_BASE if "expandable_segments:True" in meta["settings"] else SEGMENT_BASE
        assert self.base == meta["base"]
        self.allocator = CachingAllocator(
            AllocatorSettings.parse(meta["settings"], self.version),
            meta.get("total", meta["capacity"]),
            version=self.version,
            driver=Driver(meta["capacity"], POLICIES.get(str(meta.get("policy")), "first_fit")),
            event_finished=lambda event: event.number <= self.finished[event.stream],
            on_event=self.on_event,
            trace=self.on_trace,
        )

    def on_event(self, what: str, event: StreamEvent) -> None:
        if what != "record":
            self.finished[event.stream] = max(self.finished[event.stream], event.number)

    def on_trace(self, action: str, address: int, size: int, stream: int) -> None:
        if action != "flush":
            self.trace.append([action, address if action == "oom" else address - self.base, size, stream])

    def play(self, event: list[Any]) -> int | str | None:
        """Play one event; returns what the recording calls `r`."""
        allocator = self.allocator
        match event:
            case ["a", number, size, stream]:
                try:
                    block = allocator.malloc(size, stream)
                except OutOfMemory:
                    return "oom"
                self.blocks[number] = block
                return block.address - self.base if size else 0
            case ["f", number]:
                if number in self.blocks:
                    allocator.free(self.blocks.pop(number))
            case ["r", number, stream]:
                if number in self.blocks:
                    allocator.record_stream(self.blocks[number], stream)
            case ["s", stream]:
                self.finished[stream] = allocator.pending.recorded.get(stream, 0)
            case ["e"]:
                allocator.empty_cache()
            case ["c", size]:
                allocator.driver.capacity_bytes = size
            case ["set", text]:
                allocator.change_settings(AllocatorSettings.parse(text, self.version))
            case ["frac", share]:
                allocator.set_memory_fraction(share)
            case ["pb", number, flags]:
                if number not in self.pools:
                    self.pools[number] = allocator.create_pool("o" in flags, "n" in flags)
                    self.pools[number].number = number + 1
                allocator.enter_pool(self.pools[number])
            case ["pe"]:
                allocator.leave_pool()
            case ["pd", number]:
                allocator.delete_pool(self.pools.pop(number))
            case _:
                raise AssertionError(f"unknown event {event}")
        return None

    def layout(self) -> list[list[Any]]:
        return [
            [
                segment.address - self.base,
                segment.size_bytes,
                segment.stream,
                segment.pool,
                [[block.size_bytes, STATE_LETTERS[block.state], block.requested_bytes] for block in segment.blocks],
            ]
            for segment in self.allocator.segments()
        ]

    def crc(self) -> int:
        parts = []
        for address, size, stream, pool, blocks in self.layout():
            text = ";".join(f"{size},{state},{requested}" for size, state, requested in blocks)
            parts.append(f"{address},{size},{stream},{pool}:{text}")
        return zlib.crc32("|".join(parts).encode())


def stream_of(data: dict[str, Any]) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Columns (kind, handle, bytes, stream, address) of a recorded training step's allocations and frees."""
    alive: dict[int, int] = {}
    rows: list[tuple[int, int, int, int, int]] = []
    allocations = 0
    for event in data["trace"]:
        if isinstance(event, str):
            continue
        if event[0] in ("alloc", "a"):
            alive[event[1]] = allocations
            rows.append((Mem.ALLOC, allocations, event[2], event[3], event[1]))
            allocations += 1
        elif event[0] in ("free_requested", "f"):
            rows.append((Mem.FREE, alive.pop(event[1]), 0, event[3], event[1]))
    columns = np.array(rows, np.int64).reshape(-1, 5).T
    return columns[0], columns[1], columns[2], columns[3], columns[4]
