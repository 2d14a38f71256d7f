"""A passage: what a host issues on one stream, and on a second one that serves it alone, as one row of the world.

    main     0 ──▶ 1 ──▶ record 2 ──▶ 5 ──▶ wait 7 ──▶ 8        kernels, with zero-length records and waits between
                            ╲                 ╱
    beside                   wait 3 ─▶ 4 ─▶ record 6             transfers that nothing else in the world can slow

So it goes with overlapped collectives of a tensor-parallel group that has its link to itself: each starts behind what
was issued on the main stream before it, lasts a fixed time, and contends with the kernels that run meanwhile. Nothing
in it waits for anything outside, so its timeline is known once per level of contention outside, and a change of that
level is a change of timeline. Letters: N entries in host order, L contention levels.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sim.program.program import Ints

Floats = npt.NDArray[np.float64]
Span = tuple[int, float, float]
"""(entry, start_ns, end_ns)"""


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """When every entry runs at one level outside, from the start of the passage, if the host is ahead of all of them."""

    start_ns: list[float]
    end_ns: list[float]
    lead_ns: list[float]
    """[N] Per entry: with the host's clock so far before the passage's start, it is ahead of this and all later ones."""
    starts: Floats
    ends: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """N entries: `host_ns` [N] to issue each, `duration_ns` [L, N] at each level, `beside` [N] on the second stream,
    `after` [N] the earlier entry whose end it waits for, doing nothing else (-1: none), `raises` [N] the level to which
    it lifts the main stream's kernels while it runs.

    Each stream runs its entries in order; a wait on the second one is shown when it is over. A transfer starts behind
    all main entries issued before it. `quiet`: all that was issued beside before this main entry has been waited for
    before it, so that the rest does not depend on when that was.
    """

    host_ns: Ints
    duration_ns: Ints
    beside: npt.NDArray[np.bool_]
    after: Ints
    raises: Ints
    size: int = field(init=False)
    issue_ns: list[float] = field(init=False)  # [N + 1]
    issues: Floats = field(init=False)  # [N + 1]
    last_issue_ns: float = field(init=False)
    durations: list[list[float]] = field(init=False)  # [L][N]
    is_beside: list[bool] = field(init=False)
    waits_for: list[int] = field(init=False)
    lifts: list[int] = field(init=False)
    quiet: list[bool] = field(init=False)
    main_entries: list[int] = field(init=False)  # numbers of the main stream's
    transfers: list[int] = field(init=False)  # of the entries beside that lift the level
    timelines: list[Timeline] = field(init=False)

    def __post_init__(self) -> None:
        issues = np.concatenate(([0.0], np.cumsum(self.host_ns)))
        derived = {
            "size": len(self.host_ns),
            "issues": issues,
            "issue_ns": issues.tolist(),
            "last_issue_ns": float(issues[-1]),
            "durations": self.duration_ns.astype(np.float64).tolist(),
            "is_beside": self.beside.tolist(),
            "waits_for": self.after.tolist(),
            "lifts": self.raises.tolist(),
            "main_entries": np.flatnonzero(~self.beside).tolist(),
            "transfers": np.flatnonzero(self.raises).tolist(),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "quiet", self._quiet())
        object.__setattr__(self, "timelines", [self._timeline(level) for level in range(len(self.duration_ns))])

    def problems(self) -> Iterator[str]:
        """What keeps it from being a passage."""
        main_seen = last_main_awaited = open_until = awaited = -1
        for entry, (beside, after) in enumerate(zip(self.is_beside, self.waits_for)):
            if after >= entry:
                yield f"entry {entry}: waits for {after}, which comes later"
            if after >= 0 and self.duration_ns[:, entry].any():
                yield f"entry {entry}: waits and works"
            if beside:
                if after < 0 and awaited >= open_until:
                    yield f"entry {entry}: begins beside the main stream without a wait"
                open_until = entry
                if after >= 0 and not self.is_beside[after]:
                    last_main_awaited = max(last_main_awaited, after)
                if self.lifts[entry] and last_main_awaited < main_seen:
                    yield f"entry {entry}: does not wait for main entry {main_seen}"
                if (self.duration_ns[:, entry] != self.duration_ns[0, entry]).any():
                    yield f"entry {entry}: a transfer's time depends on the level"
            else:
                main_seen = entry
                awaited = max(awaited, after if after >= 0 and self.is_beside[after] else -1)
                if self.lifts[entry]:
                    yield f"entry {entry}: a kernel lifts the level"
        if not self.size or self.is_beside[-1] or self.is_beside[0]:
            yield "begins or ends beside the main stream"
        elif awaited < open_until:
            yield "ends before what runs beside"

    def _quiet(self) -> list[bool]:
        quiet, open_until, awaited = [], -1, -1
        for entry, (beside, after) in enumerate(zip(self.is_beside, self.waits_for)):
            quiet.append(not beside and awaited >= open_until)
            if beside:
                open_until = entry
            elif after >= 0 and self.is_beside[after]:
                awaited = max(awaited, after)
        return quiet

    def _timeline(self, level: int) -> Timeline:
        spans, _, _ = run(self, level, -math.inf, 0.0, 0, 1.0, [0.0] * self.size, [0.0] * self.size, follow=False)
        starts = np.array([start for _, start, _ in spans])
        ends = np.array([end for _, _, end in spans])
        lead = np.maximum.accumulate((self.issues[1:] - starts)[::-1])[::-1]
        return Timeline(starts.tolist(), ends.tolist(), lead.tolist(), starts, ends)


def run(
    passage: Passage, level: int, base_ns: float, now_ns: float, entry: int, left: float, start_ns: list[float],
    end_ns: list[float], follow: bool = True,
) -> tuple[list[Span], int, float]:  # fmt: skip
    """Play from main entry `entry` on, of which a fraction `left` is to be done, at a level outside.

    `base_ns`: the host's clock before the passage; `now_ns`: when the main stream is free; `start_ns`, `end_ns` hold what
    is known of entries before `entry` (and are filled). With `follow`, stops at the first entry from which the level's
    timeline is followed, shifted. Returns the spans up to there, that entry (N: none) and the shift.
    """
    durations, issue_ns, beside, lifts = passage.durations[level], passage.issue_ns, passage.is_beside, passage.lifts
    waits_for, quiet = passage.waits_for, passage.quiet
    timeline = passage.timelines[level] if follow else None
    main_free, beside_free = now_ns, -math.inf
    running: list[tuple[float, float, int]] = []
    for other in passage.transfers:
        if other >= entry:
            break
        if end_ns[other] > now_ns:
            running.append((start_ns[other], end_ns[other], lifts[other]))
    for other in range(entry - 1, -1, -1):
        if beside[other]:
            beside_free = end_ns[other]
            break
    spans: list[Span] = []
    for at in range(entry, passage.size):
        start = beside_free if beside[at] else main_free
        issued = base_ns + issue_ns[at + 1]
        if issued > start:
            start = issued
        after, end = waits_for[at], start
        if after >= 0:
            end = max(start, end_ns[after])
            start = end if beside[at] else start
        elif beside[at]:
            end = start + durations[at]
            if lifts[at] and end > start:
                running.append((start, end, lifts[at]))
        else:
            if timeline is not None and left == 1.0 and quiet[at]:
                shift = start - timeline.start_ns[at]
                if base_ns + timeline.lead_ns[at] <= shift:
                    return spans, at, shift
            if durations[at]:
                end = start + left * durations[at] if not running else _end(passage, level, at, start, left, running)
        if beside[at]:
            beside_free = end
        else:
            left, main_free = 1.0, end
        start_ns[at], end_ns[at] = start, end
        spans.append((at, start, end))
    return spans, passage.size, 0.0


def reached(
    passage: Passage, level: int, entry: int, left: float, start_ns: list[float], end_ns: list[float], now_ns: float
) -> tuple[int, float]:
    """The main entry that is under way (or next) at a time of a plan that began at `entry`, and what is left of it.

    (N, 1.0) at the end. `start_ns`, `end_ns`: of all entries as planned.
    """
    at = bisect_right(passage.main_entries, now_ns, key=end_ns.__getitem__)
    if at == len(passage.main_entries):
        return passage.size, 1.0
    found = passage.main_entries[at]
    before = left if found == entry else 1.0
    if start_ns[found] >= now_ns:
        return found, before
    time, done, durations = start_ns[found], 0.0, passage.durations
    if not durations[level][found]:
        return found, 0.0  # waits
    for other in passage.transfers:
        begin, end = start_ns[other], min(end_ns[other], now_ns)
        if other >= found or begin >= now_ns:
            break
        if end > time:
            if begin > time:
                done += (begin - time) / durations[level][found]
                time = begin
            done += (end - time) / durations[max(level, passage.lifts[other])][found]
            time = end
    done += (now_ns - time) / durations[level][found]
    return found, max(before - done, 0.0)


def _end(
    passage: Passage, level: int, entry: int, start: float, left: float, running: list[tuple[float, float, int]]
) -> float:
    """When a kernel ends of which a fraction is left, with transfers beside it; those that are over are dropped."""
    now, whole = start, passage.durations[level][entry]
    while running and running[0][1] <= start:
        running.pop(0)
    for begin, end, lift in running:
        if end <= now:
            continue
        if begin > now:
            if now + left * whole <= begin:
                return now + left * whole
            left -= (begin - now) / whole
            now = begin
        contended = passage.durations[max(level, lift)][entry]
        if now + left * contended <= end:
            return now + left * contended
        left -= (end - now) / contended
        now = end
    return now + max(left, 0.0) * whole
