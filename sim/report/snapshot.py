"""A memory snapshot as torch.cuda.memory._dump_snapshot writes it: pytorch.org/memory_viz opens it.

Made without torch, of plain dicts, lists, strings and whole numbers. Frames are the model's, not Python's: operator and
module, the modules around it, phase, step; so the viewer's flame graphs show the model. `category` is the owner.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from sim.api import device_bytes
from sim.engine.allocator.layout import SegmentLayout
from sim.engine.history import Entry, record_history
from sim.program.program import Owner
from sim.scenario.allocator.settings import MIB, UNLIMITED, AllocatorSettings
from sim.scenario.setup import Setup
from sim.timeline.clock import memory_clock
from sim.timeline.lanes import Lanes
from sim.timeline.memory import MemoryTimeline

MOST_EVENTS = 200_000
"""So many memory events are in the trace, the last ones: as PyTorch's `max_entries` drops the oldest."""

STATES = {"allocated": "active_allocated", "pending": "active_awaiting_free", "free": "inactive"}

Frame = dict[str, str | int]


def snapshot_bytes(setup: Setup, memory: MemoryTimeline, lanes: Lanes) -> bytes:
    """The pickle (protocol 4) of one rank; `lanes` give the times (host's clock, microseconds).

    `memory` is the one on the device, so an out-of-memory is the last entry of the trace.
    """
    total, capacity = device_bytes(setup)
    history = record_history(memory, setup.allocator, total, capacity, setup.torch, MOST_EVENTS)
    stacks = Stacks(memory)
    times = (memory_clock(memory, lanes).issue_ns // 1000).astype(np.int64).tolist()
    times.append(times[-1] if times else 0)  # of the allocation that found no memory
    return pickle.dumps(
        {
            "segments": [stacks.segment(segment) for segment in history.segments],
            "device_traces": [[stacks.entry(entry, times[entry.event]) for entry in history.entries]],
            "allocator_settings": _settings(setup),
            "external_annotations": [],
        },
        protocol=4,
    )


class Stacks:
    """Entries and blocks of a snapshot with their frames. A stack is one object per place, which the pickle holds once."""

    def __init__(self, memory: MemoryTimeline) -> None:
        program = memory.program
        self.program, self.where, self.owners = program, program.mem_where.tolist(), program.owners.tolist()
        self.handle = program.mem_handle.tolist()
        self.begins = np.array([first for first, _ in memory.steps()], np.int64)
        self.stacks: dict[tuple[int, int], list[Frame]] = {}
        events = np.arange(len(self.where))
        self.step = (np.searchsorted(self.begins, events, "right") - 1).tolist()
        live = np.flatnonzero((memory.born < memory.played) & (memory.died >= memory.played))
        self.born = dict(zip(memory.address[memory.born[live]].tolist(), memory.born[live].tolist()))

    def entry(self, entry: Entry, time_us: int) -> dict[str, Any]:
        """One entry of a trace."""
        row: dict[str, Any] = {
            "action": entry.action,
            "device_free" if entry.action == "oom" else "addr": entry.address,
            "size": entry.bytes,
            "stream": entry.stream,
            "time_us": time_us,
            "frames": self.frames(entry.event),
        }
        if entry.action == "alloc":
            row["category"] = Owner(self.owners[self.handle[entry.event]]).label
        return row

    def segment(self, segment: SegmentLayout) -> dict[str, Any]:
        """One segment with its blocks."""
        blocks = [
            {
                "address": block.address,
                "size": block.size_bytes,
                "requested_size": block.requested_bytes,
                "state": STATES[block.state],
                "frames": self.frames(self.born[block.address]) if block.address in self.born else [],
            }
            for block in segment.blocks
        ]
        active = [block for block in segment.blocks if block.state != "free"]
        return {
            "device": 0,
            "address": segment.address,
            "total_size": segment.size_bytes,
            "stream": segment.stream,
            "segment_type": segment.pool,
            "segment_pool_id": (0, 0),
            "is_expandable": segment.expandable,
            "allocated_size": sum(block.size_bytes for block in active if block.state == "allocated"),
            "active_size": sum(block.size_bytes for block in active),
            "requested_size": sum(block.requested_bytes for block in active),
            "frames": [],
            "blocks": blocks,
        }

    def frames(self, event: int) -> list[Frame]:
        """The stack of a memory event, innermost first."""
        key = (self.where[event], self.step[event])
        if key not in self.stacks:
            self.stacks[key] = self.stack(*key)
        return self.stacks[key]

    def stack(self, where: int, step: int) -> list[Frame]:
        phase, path, operator = self.program.where(where)
        parts = path.split(".") if path else []
        modules = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        kinds = ["operator", *["module"] * len(modules), "phase", "run"]
        names = [operator or "the script", *modules, phase.name.lower(), "set-up" if step < 0 else f"step {step}"]
        return [{"name": name, "filename": kind, "line": 0} for kind, name in zip(kinds, names)]


def _settings(setup: Setup) -> dict[str, Any]:
    settings = AllocatorSettings.parse(setup.allocator, setup.torch)
    split = settings.max_split_bytes
    return {
        "PYTORCH_CUDA_ALLOC_CONF": setup.allocator,
        "max_split_size": -1 if split == UNLIMITED else split // MIB,
        "garbage_collection_threshold": settings.gc_threshold,
        "expandable_segments": settings.expandable_segments,
        "roundup_power2_divisions": {str(1 << n): size for n, size in enumerate(settings.roundup_divisions)},
    }
