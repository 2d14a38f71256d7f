"""What differs between PyTorch versions in the CUDA caching allocator."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Tie = Literal["address", "block_number", "segment_age"]

PATTERN = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Rules:
    """Which variant of each rule a PyTorch version follows.

    tie: order of equally large free blocks of one stream: lowest address; creation number of the block (PR 178362);
    age of the segment, then address in it (PR 183591).
    """

    tie: Tie
    full_fraction_is_a_limit: bool
    """A memory fraction of 1.0 caps at the device's total memory (True) or removes the cap."""
    open_interval_overwrites: bool
    """In roundup_power2_divisions `>` also replaces the last named interval."""
    large_segment_option: bool
    """`large_segment_size_mb` exists."""
    fraction_option: bool
    """`per_process_memory_fraction` and `throw_on_cudamalloc_oom` exist."""
    oversize_includes_large_segment: bool
    """max_split_size_mb may equal the large segment's size; before, it had to be greater."""
    private_pools_wait: bool
    """Inside use_mem_pool events are processed and an out-of-memory flushes the cache."""


def rules_of(version: str) -> Rules:
    """Rules of a PyTorch version such as "2.14" or "2.14.1+cu130". Raises ValueError for text that is no version.

    Source: recordings of 2.9.1, 2.12.1, 2.13.0 and 2.14.1; versions between follow the older neighbour.
    """
    match = PATTERN.match(version)
    if match is None:
        raise ValueError(f"{version!r} is not a PyTorch version: two numbers are expected, e.g. 2.14")
    number = (int(match[1]), int(match[2]))
    tie: Tie
    if number < (2, 12):
        tie = "address"
    elif number < (2, 13):
        tie = "block_number"
    else:
        tie = "segment_age"
    return Rules(
        tie=tie,
        full_fraction_is_a_limit=number < (2, 12),
        open_interval_overwrites=number < (2, 12),
        large_segment_option=number >= (2, 12),
        fraction_option=number >= (2, 13),
        oversize_includes_large_segment=number >= (2, 12),
        private_pools_wait=number >= (2, 13),
    )
