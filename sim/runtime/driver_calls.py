"""What the allocator's calls to the driver cost the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sim.cost.model import CostModel
from sim.program.program import Program

COST = {
    "segment_alloc": ("cuda_malloc", False),
    "segment_free": ("cuda_free", True),
    "segment_map": ("map", False),
    "segment_unmap": ("unmap", True),
    "flush": ("synchronize", True),
}
"""By action of the allocator: the call, and whether it waits until the device is idle."""


@dataclass(frozen=True, slots=True)
class HostCall:
    """A driver call: before row `row`, for `host_ns`; `waits`: until the device is idle."""

    row: int
    host_ns: int
    waits: bool


def host_calls(program: Program, calls: Iterable[tuple[int, str, int]], cost: CostModel) -> list[HostCall]:
    """Of calls as (memory event, action, bytes)."""
    prices = {action: (cost.driver_call_ns(call), waits) for action, (call, waits) in COST.items()}
    return [HostCall(int(program.mem_row[event]), *prices[action]) for event, action, _ in calls]
