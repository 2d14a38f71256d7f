"""Counts and bytes as torch.cuda.memory_stats reports them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

ALL, SMALL, LARGE = range(3)
POOL_NAMES = ("all", "small_pool", "large_pool")


@dataclass(slots=True)
class Gauge:
    """One statistic: its value and the largest value it had, for all pools, the small and the large pools."""

    current: list[int] = field(default_factory=lambda: [0, 0, 0])
    peak: list[int] = field(default_factory=lambda: [0, 0, 0])

    def add(self, pool: int, amount: int) -> None:
        """Change by `amount` in `pool` (SMALL or LARGE)."""
        current = self.current
        current[ALL] += amount
        current[pool] += amount
        if amount > 0:
            peak = self.peak
            if current[ALL] > peak[ALL]:
                peak[ALL] = current[ALL]
            if current[pool] > peak[pool]:
                peak[pool] = current[pool]

    def add_series(self, amounts: Ints, small: npt.NDArray[np.bool_]) -> Ints:
        """Change by one amount after another, in the small pool where `small`; returns the values of all pools."""
        total = np.cumsum(amounts)
        of_small = np.cumsum(np.where(small, amounts, 0))
        for pool, series in ((ALL, total), (SMALL, of_small), (LARGE, total - of_small)):
            self.peak[pool] = max(self.peak[pool], self.current[pool] + int(series.max()))
            self.current[pool] += int(series[-1])
        total += self.current[ALL] - total[-1]
        return total


@dataclass(slots=True)
class Statistics:
    """All statistics of one device. Names are those of torch.cuda.memory_stats; private pools are included."""

    allocated_bytes: Gauge = field(default_factory=Gauge)
    active_bytes: Gauge = field(default_factory=Gauge)
    reserved_bytes: Gauge = field(default_factory=Gauge)
    inactive_split_bytes: Gauge = field(default_factory=Gauge)
    requested_bytes: Gauge = field(default_factory=Gauge)
    allocation: Gauge = field(default_factory=Gauge)
    active: Gauge = field(default_factory=Gauge)
    segment: Gauge = field(default_factory=Gauge)
    inactive_split: Gauge = field(default_factory=Gauge)
    oversize_allocations: Gauge = field(default_factory=Gauge)
    oversize_segments: Gauge = field(default_factory=Gauge)
    num_alloc_retries: int = 0
    num_ooms: int = 0
    num_sync_all_streams: int = 0
    num_device_alloc: int = 0
    num_device_free: int = 0

    def reset_peaks(self) -> None:
        """Peaks start again at the current values (torch.cuda.reset_peak_memory_stats)."""
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Gauge):
                value.peak = list(value.current)

    def as_dict(self) -> dict[str, int]:
        """Flat names as in torch.cuda.memory_stats: "allocated_bytes.all.peak", "num_ooms" ..."""
        flat: dict[str, int] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Gauge):
                for pool, name in enumerate(POOL_NAMES):
                    flat[f"{item.name}.{name}.current"] = value.current[pool]
                    flat[f"{item.name}.{name}.peak"] = value.peak[pool]
            else:
                flat[item.name] = value
        return flat
