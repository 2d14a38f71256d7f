"""The driver below the allocator: how much memory there is, and at which addresses it hands it out."""

from __future__ import annotations

from bisect import insort
from typing import Literal

Policy = Literal["first_fit", "rising", "falling"]

GRANULARITY_BYTES = 2 << 20
RANGE_SPACING_BYTES = 1 << 30
SEGMENT_BASE = 0x7F00_0000_0000
RANGE_BASE = 0x3000_0000_0000
FALLING_START = SEGMENT_BASE + (1 << 38)


class Driver:
    """Device memory as cudaMalloc, cudaFree and the virtual memory calls see it.

    Addresses of cudaMalloc: "first_fit" takes the lowest free one and reuses released ones at once; "rising" and
    "falling" never reuse any. All are multiples of 2 MiB, and a size counts rounded up to 2 MiB. Virtual ranges lie
    apart, 1 GiB behind one another. `capacity_bytes` may change at any time (another process took or gave memory).
    """

    def __init__(self, capacity_bytes: int, policy: Policy = "first_fit") -> None:
        self.capacity_bytes = capacity_bytes
        self.policy = policy
        self.used_bytes = 0
        self.refusals: list[int] = []
        """Sizes of refused requests, in bytes, in order."""
        self._live: list[tuple[int, int]] = []
        self._sizes: dict[int, int] = {}
        self._rising = SEGMENT_BASE
        self._falling = FALLING_START
        self._next_range = RANGE_BASE

    @property
    def free_bytes(self) -> int:
        """What cudaMemGetInfo reports as free."""
        return max(self.capacity_bytes - self.used_bytes, 0)

    def malloc(self, size_bytes: int) -> int | None:
        """Address of a new allocation, or None if it is refused (cudaMalloc)."""
        charged = round_up(size_bytes, GRANULARITY_BYTES)
        if not self._charge(charged, size_bytes):
            return None
        address = self._place(charged)
        self._sizes[address] = charged
        insort(self._live, (address, charged))
        return address

    def free(self, address: int) -> None:
        """Give an allocation back (cudaFree)."""
        charged = self._sizes.pop(address)
        self._live.remove((address, charged))
        self.used_bytes -= charged

    def reserve(self, size_bytes: int) -> int:
        """Address of a new virtual range without memory behind it (cuMemAddressReserve)."""
        address = self._next_range
        self._next_range += round_up(size_bytes, RANGE_SPACING_BYTES) + RANGE_SPACING_BYTES
        return address

    def create_pages(self, count: int, page_bytes: int) -> bool:
        """Memory for `count` pages, one request each; all or none (cuMemCreate and cuMemMap)."""
        for page in range(count):
            if not self._charge(page_bytes, page_bytes):
                self.used_bytes -= page * page_bytes
                return False
        return True

    def release_pages(self, count: int, page_bytes: int) -> None:
        """Give pages back (cuMemUnmap and cuMemRelease)."""
        self.used_bytes -= count * page_bytes

    def _charge(self, charged_bytes: int, size_bytes: int) -> bool:
        if self.used_bytes + charged_bytes > self.capacity_bytes:
            self.refusals.append(size_bytes)
            return False
        self.used_bytes += charged_bytes
        return True

    def _place(self, charged_bytes: int) -> int:
        if self.policy == "rising":
            self._rising += charged_bytes
            return self._rising - charged_bytes
        if self.policy == "falling":
            self._falling -= charged_bytes
            return self._falling
        at = SEGMENT_BASE
        for address, size in self._live:
            if address - at >= charged_bytes:
                break
            at = address + size
        return at


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
