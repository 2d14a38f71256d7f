"""Memory without an allocator: the bytes that tensors hold, nothing of where they lie.

For very large runs (`allocator: off`). Peaks of allocated bytes differ from the full play by what blocks hold beyond
their requests (ALLOCATOR.md: less than 1 MiB per large block); active and reserved bytes are taken as allocated ones, so
fragmentation is left out.
"""

from __future__ import annotations

import numpy as np

from sim.program.program import Mem, Program
from sim.scenario.allocator.settings import MIN_BLOCK_BYTES
from sim.timeline.memory import MemoryTimeline, OutOfMemoryEvent


def sum_memory(program: Program, capacity_bytes: int, block_bytes: int = MIN_BLOCK_BYTES) -> MemoryTimeline:
    """Bytes of live tensors after every event, each rounded up to `block_bytes`, until they exceed `capacity_bytes`."""
    sizes = np.zeros(len(program.owners), np.int64)
    born = program.mem_kind == Mem.ALLOC
    sizes[program.mem_handle[born]] = program.mem_bytes[born]
    sizes = -(-sizes // block_bytes) * block_bytes
    held_bytes = sizes[program.mem_handle]
    sign = np.where(born, 1, np.where(program.mem_kind == Mem.FREE, -1, 0))
    allocated = np.cumsum(sign * held_bytes)
    failed = int(np.argmax(allocated > capacity_bytes)) if allocated.max(initial=0) > capacity_bytes else None
    refused = None
    if failed is not None:
        before = int(allocated[failed - 1]) if failed else 0
        size = int(held_bytes[failed])
        refused = OutOfMemoryEvent(
            event=failed,
            requested_bytes=int(program.mem_bytes[failed]),
            driver_bytes=size,
            device_free_bytes=capacity_bytes - before,
            allocated_bytes=before,
            reserved_bytes=before,
        )
    allocated = allocated[:failed]
    return MemoryTimeline(
        program=program,
        allocated_bytes=allocated,
        active_bytes=allocated,
        reserved_bytes=allocated,
        block_bytes=held_bytes[:failed],
        address=np.broadcast_to(np.int64(0), len(allocated)),
        driver_calls=(),
        out_of_memory=refused,
    )
