"""The peak of a real step in bytes: what PyTorch's CPU allocator reports to its profiler, which changes nothing of it.

Counted are tensors' bytes as they are asked for, over what was there as the step began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

BORDER_ELEMENTS = 7919
"""Of a tensor that stands between two steps in the profile."""


def peak_bytes(step: Callable[[], None]) -> int:
    """Of a step that has run before. It runs twice, so that what the second frees has been seen to come."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
        torch.empty(BORDER_ELEMENTS, dtype=torch.uint8)
        step()
    events = sorted(_allocations(profiler))
    border = next(i for i, (_, size, _) in enumerate(events) if size == BORDER_ELEMENTS)
    live: dict[int, int] = {}
    total = peak = 0
    for number, (_, size, pointer) in enumerate(events):
        if size > 0:
            live[pointer] = size
        else:
            size = -live.pop(pointer, 0)  # 0: made before the profile began
        if number > border + 1:
            total += size
            peak = max(peak, total)
    return peak


def _allocations(profiler: Any) -> Iterator[tuple[int, int, int]]:
    """(time, bytes, pointer) of every allocation, and of every free with negative bytes."""
    todo = list(profiler.profiler.kineto_results.experimental_event_tree())
    while todo:
        event = todo.pop()
        todo.extend(event.children)
        if "Allocation" in str(event.tag):
            fields = event.extra_fields
            yield event.start_time_ns, fields.alloc_size, fields.ptr
