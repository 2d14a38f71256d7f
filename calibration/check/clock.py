"""How times are taken on a processor: one thread on one core, memory that is kept, a rest after what was timed."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES = 1 << 30
REST = 0.1
"""Of what was timed, slept afterwards: other processes get their turn then and not within the next call."""
TRIM = 0.1
"""Of the samples at either end that a mean leaves out."""
DEFAULT_CACHE_BYTES = 32 << 20


def prepare(threads: int = 1) -> None:
    """A fixed number of threads; one of them stays on one core. What is freed stays with the process (glibc's malloc), so
    that no page is faulted in anew within a step."""
    torch.set_num_threads(threads)
    if threads == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def times_ns(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Of one call after the other; then a rest."""
    times = []
    for call in calls:
        begin = time.perf_counter_ns()
        call()
        times.append(float(time.perf_counter_ns() - begin))
    time.sleep(REST * sum(times) / 1e9)
    return times


def typical(samples: Sequence[float]) -> float:
    """The mean without the ends: sums of such means are such means of sums, which is not so for medians."""
    ordered = np.sort(np.asarray(samples, float))
    cut = int(TRIM * len(ordered))
    return float(ordered[cut : len(ordered) - cut].mean())


def spread(samples: Sequence[float]) -> float:
    """Half the distance between the quartiles, as a share of the median."""
    low, middle, high = np.quantile(np.asarray(samples, float), (0.25, 0.5, 0.75)).tolist()
    return float((high - low) / 2 / middle) if middle else 0.0


def last_cache_bytes() -> int:
    names = [name for name in ("SC_LEVEL4_CACHE_SIZE", "SC_LEVEL3_CACHE_SIZE") if name in os.sysconf_names]
    return next((size for size in map(os.sysconf, names) if size > 0), DEFAULT_CACHE_BYTES)
