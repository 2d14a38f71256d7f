"""Why a setting helped, or did not: the step with and without it, phase by phase and owner by owner."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.text import Text

from sim.api import Outcome
from sim.program.program import PHASE_SHIFT, Owner, Phase
from sim.report.tables import Filled, tables
from sim.report.words import NOTHING, place
from sim.units import format_bytes, format_duration

PHASES = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.RECOMPUTE, Phase.CLIP, Phase.OPTIMIZER)
HELPS = 0.05  # of the peak
WORTH_SAYING = 0.01


def phase_peaks(outcome: Outcome) -> dict[str, int]:
    """Most active bytes in each phase of the last step, and those between forward and backward."""
    memory = outcome.worst.shown
    first, last = memory.steps()[-1]
    active = memory.active_bytes[first:last]
    phases = memory.program.mem_where[first:last] >> PHASE_SHIFT
    found: dict[str, int] = {}
    for phase in PHASES:
        inside = np.flatnonzero(phases == phase)
        if len(inside):
            found[phase.name.lower()] = int(active[inside].max())
        if phase == Phase.LOSS and (later := np.flatnonzero(phases == Phase.BACKWARD)).size:
            found["between forward and backward"] = int(active[max(int(later[0]) - 1, 0)])
    return found


def show_knob(console: Console, knob: str, before: Outcome, after: Outcome) -> None:
    """Peaks per phase and owners at the peak without and with a setting, then what that means."""
    console.print(Text.assemble((f"{before.name}: ", "bold"), knob, "\n"))
    a, b = phase_peaks(before), phase_peaks(after)
    rows = [(name, a.get(name), b.get(name)) for name in dict.fromkeys((*a, *b))]
    rows += [
        (f"peak: {owner.label}", before.owners.get(owner), after.owners.get(owner)) for owner in _held(before, after)
    ]
    rows += [("peak active", before.steady.active_bytes, after.steady.active_bytes)]
    rows += [("peak reserved", before.steady.reserved_bytes, after.steady.reserved_bytes)]
    names, without, with_it, difference = zip(*((n, _size(x), _size(y), _difference(x, y)) for n, x, y in rows))
    columns = [Filled("without", without), Filled("with it", with_it), Filled("difference", difference)]
    for table in tables(Filled("most active bytes", names, "left"), columns, console.width):
        console.print(table, "")
    console.print(" ".join(verdict(before, after)))


def _held(before: Outcome, after: Outcome) -> Iterator[Owner]:
    least = WORTH_SAYING * before.peak.bytes
    yield from (o for o in Owner if max(before.owners.get(o, 0), after.owners.get(o, 0)) >= least)


def _size(count: int | None) -> str:
    return NOTHING if count is None else format_bytes(count)


def _difference(before: int | None, after: int | None) -> str:
    change = (after or 0) - (before or 0)
    return "0" if change == 0 else f"{'+' if change > 0 else '-'}{format_bytes(abs(change))}"


def verdict(before: Outcome, after: Outcome) -> Iterator[str]:
    """Sentences: did the peak fall, and if not, where else the setting acted and who holds the peak."""
    if before.setup == after.setup:
        yield "That is what the strategy does already: nothing changes."
        return
    old, new = before.steady.active_bytes, after.steady.active_bytes
    saved = old - new
    where = place(after.peak.phase.name.lower(), after.peak.path)
    if saved >= HELPS * old:
        yield f"It lowers the peak by {format_bytes(saved)} ({saved / old:.0%}); then the peak is in {where}."
    else:
        amount = "does not lower the peak" if saved <= 0 else f"lowers the peak by {saved / old:.1%} only"
        yield f"It {amount}: that is in {where}, where {_holders(after)}."
        elsewhere = _best_elsewhere(before, after)
        if elsewhere is not None:
            yield elsewhere
    yield from _about_time(before, after)
    fell = before.steady.reserved_bytes - after.steady.reserved_bytes
    if saved >= HELPS * old and fell < saved / 2:
        yield (
            f"Reserved memory falls by {format_bytes(max(fell, 0))} only: the allocator keeps the segments of the largest "
            "moment, cut into blocks that later requests do not fit."
        )


def _holders(outcome: Outcome) -> str:
    largest = [(owner, size) for owner, size in outcome.owners.items() if size >= HELPS * outcome.peak.bytes][:3]
    names = [f"{owner.label} hold {format_bytes(size)}" for owner, size in largest]
    return ", ".join(names) or "many small owners share it"


def _best_elsewhere(before: Outcome, after: Outcome) -> str | None:
    a, b = phase_peaks(before), phase_peaks(after)
    gains = {name: a[name] - b[name] for name in a if name in b}
    best = max(gains, key=lambda name: gains[name], default=None)
    if best is None or gains[best] < WORTH_SAYING * before.steady.active_bytes:
        return "No other phase holds noticeably less either." if best is not None else None
    phrase = best if best.startswith("between") else f"in {best}"
    return f"It does take {format_bytes(gains[best])} off {phrase}, which is not where the peak is."


def _about_time(before: Outcome, after: Outcome) -> Iterator[str]:
    if before.time is None or after.time is None:
        return
    longer = after.time.step_ns - before.time.step_ns
    share = longer / before.time.step_ns
    if abs(share) < 0.0005:
        yield f"The step takes as long as before ({format_duration(after.time.step_ns)})."
    else:
        yield f"The step takes {format_duration(after.time.step_ns)}, {share:+.1%}."
