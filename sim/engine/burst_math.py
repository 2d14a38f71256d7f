"""Where a burst stands, without a clock. Pure functions over prefix sums; times in float nanoseconds."""

from __future__ import annotations

import numpy as np

from sim.program.world import Burst, Floats


def starved(
    burst: Burst, scale: float, base_ns: float, now_ns: float, level: int, kernel: int, fraction: float
) -> tuple[Floats, Floats]:
    """Starts and ends of kernels `kernel`.. at this level when the host is still issuing some of them.

    A kernel starts when it is issued and its predecessor has ended; `fraction` of the first is done already. With
    `before` the work ahead of each kernel, the start is a running maximum: max(ready - before so far) + before.
    """
    duration_ns = burst.duration_ns[level, kernel:] * scale
    duration_ns[0] *= 1.0 - fraction
    before_ns = np.cumsum(duration_ns) - duration_ns
    ready_ns = np.maximum(base_ns + burst.issue_ns[kernel + 1 :], now_ns)
    starts_ns = np.maximum.accumulate(ready_ns - before_ns) + before_ns
    return starts_ns, starts_ns + duration_ns


def work_done(work_ns: Floats, kernel: int, fraction: float) -> float:
    """Work of a burst that is done when `fraction` of `kernel` is, from the prefix sums [N + 1] of one level."""
    if not kernel and not fraction:
        return 0.0
    return float(work_ns[kernel] + fraction * (work_ns[kernel + 1] - work_ns[kernel]))


def position(work_ns: Floats, kernel: int, done_ns: float) -> tuple[int, float]:
    """Kernel reached and fraction of it done when `done_ns` of a burst's work is done; never before `kernel`.

    `work_ns` [N + 1] are the prefix sums of one level. Returns (N, 0.0) at the end.
    """
    last = len(work_ns) - 1
    at = min(max(int(work_ns.searchsorted(done_ns, "right")) - 1, kernel), last)
    length_ns = float(work_ns[at + 1] - work_ns[at]) if at < last else 0.0
    return at, min(max(0.0, float(done_ns - work_ns[at]) / length_ns), 1.0) if length_ns else 0.0


def position_starved(
    starts_ns: Floats, ends_ns: Floats, duration_ns: Floats, kernel: int, now_ns: float
) -> tuple[int, float]:
    """The same at a time among planned starts, between which the stream may be idle.

    Starts and ends are those of kernels `kernel`..; `duration_ns` [N] holds the whole durations of all kernels.
    """
    at = int(starts_ns.searchsorted(now_ns, "right")) - 1
    if at < 0:
        return kernel, 0.0
    left_ns = ends_ns[at] - now_ns
    if left_ns <= 0.0:
        return kernel + at + 1, 0.0
    return kernel + at, float(1.0 - left_ns / duration_ns[kernel + at])
