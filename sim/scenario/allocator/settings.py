"""PYTORCH_CUDA_ALLOC_CONF: its values, and the two size computations that depend on them."""

from __future__ import annotations

import sys
from dataclasses import dataclass

ALLOCATOR_OFF = "off"
"""Stands for no allocator at all: only the bytes of tensors are counted."""
MIB = 1 << 20
MIN_BLOCK_BYTES = 512
SMALL_LIMIT_BYTES = MIB
"""Rounded requests up to and including this size use the small pool."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_CUTOFF_BYTES = 10 * MIB
"""Rounded requests from here on get a driver allocation of their own."""
LARGE_ROUNDING_BYTES = 2 * MIB
ROUNDUP_ENTRIES = 16
UNLIMITED = sys.maxsize


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """Settings of the caching allocator; defaults are PyTorch's."""

    expandable_segments: bool = False
    max_split_bytes: int = UNLIMITED
    """Blocks of this size or more are never split, and serve only requests of this size or more."""
    max_non_split_rounding_bytes: int = 20 * MIB
    """How much larger than its request a block of max_split_bytes or more may be."""
    large_segment_bytes: int = 20 * MIB
    """Driver request for 1 MiB < request < 10 MiB; page of expandable segments of the large pool."""
    roundup_divisions: tuple[int, ...] = (0,) * ROUNDUP_ENTRIES
    """Divisions per power of two for requests of 1, 2, 4 ... 32768 MiB; 0 and 1: round to 512 bytes only."""
    gc_threshold: float = 0.0
    """Share of the memory limit above which unused cached blocks are released; needs a limit to have any effect."""
    memory_fraction: float | None = None
    """Share of the device's memory that may be obtained from the driver."""

    @classmethod
    def parse(cls, text: str, version: str = "2.14") -> AllocatorSettings:
        """Settings from the text of PYTORCH_CUDA_ALLOC_CONF, e.g. "expandable_segments:True,max_split_size_mb:128".

        Raises SettingsError, which lists every problem of the text.
        """
        from sim.scenario.allocator.parse import parse_settings

        return cls(**parse_settings(text, version))

    def round_bytes(self, request_bytes: int) -> int:
        """Size that a request takes inside a segment, in bytes (a multiple of 512)."""
        if request_bytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        entry = request_bytes.bit_length() - 1 - 20
        divisions = self.roundup_divisions[min(max(entry, 0), ROUNDUP_ENTRIES - 1)]
        if divisions > 1 and request_bytes > MIN_BLOCK_BYTES * divisions:
            return round_power2(request_bytes, divisions)
        return -(-request_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    def driver_bytes(self, rounded_bytes: int) -> int:
        """Size that is asked of the driver when no cached block serves a rounded request, in bytes."""
        if rounded_bytes <= SMALL_LIMIT_BYTES:
            return SMALL_SEGMENT_BYTES
        if rounded_bytes < LARGE_CUTOFF_BYTES:
            return self.large_segment_bytes
        return -(-rounded_bytes // LARGE_ROUNDING_BYTES) * LARGE_ROUNDING_BYTES

    def page_bytes(self, small: bool) -> int:
        """Physical page of an expandable segment, in bytes."""
        return SMALL_SEGMENT_BYTES if small else self.large_segment_bytes


def round_power2(request_bytes: int, divisions: int) -> int:
    """Round up to the next of `divisions` equal steps between two powers of two, in bytes."""
    floor = 1 << (request_bytes.bit_length() - 1)
    if floor == request_bytes:
        return request_bytes
    step = floor >> (divisions.bit_length() - 1)
    if step == 0:
        return 2 * floor
    return -(-request_bytes // step) * step
