"""Plays a program's memory events through the caching allocator."""

from __future__ import annotations

from sim.engine.allocator import AllocatorSettings, CachingAllocator
from sim.program.program import Program
from sim.timeline.memory import MemoryTimeline, OutOfMemoryEvent


def play_memory(
    program: Program, settings_text: str, total_bytes: int, capacity_bytes: int, version: str
) -> MemoryTimeline:
    """The allocator's answer to every event, until the end or an out-of-memory.

    total_bytes: the device as cudaMemGetInfo shows it; capacity_bytes: what the driver can give to this process (total
    less context and communicators). Raises SettingsError for a settings text that PyTorch would not accept.
    """
    allocator = CachingAllocator(AllocatorSettings.parse(settings_text, version), total_bytes, capacity_bytes, version)
    played = allocator.play(program.mem_kind, program.mem_handle, program.mem_bytes, program.mem_stream)
    failure = played.out_of_memory
    return MemoryTimeline(
        program=program,
        allocated_bytes=played.allocated_bytes,
        active_bytes=played.active_bytes,
        reserved_bytes=played.reserved_bytes,
        block_bytes=played.block_bytes,
        address=played.address,
        driver_calls=tuple((call.event, call.action, call.size_bytes) for call in played.driver_calls),
        out_of_memory=None
        if failure is None
        else OutOfMemoryEvent(
            event=played.played,
            requested_bytes=failure.requested_bytes,
            driver_bytes=failure.driver_bytes,
            device_free_bytes=failure.device_free_bytes,
            allocated_bytes=failure.allocated_bytes,
            reserved_bytes=failure.reserved_bytes,
        ),
    )
