"""Why a moment's memory is what it is: who is alive, made by what, waiting for what; and what would lower a peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.text import Text

from sim.api import Outcome, shown_lanes
from sim.plan.changes import Effect
from sim.program.program import Ints, Phase
from sim.program.world import Floats
from sim.report.errors import RunError
from sim.report.summary import AWAITING_STREAM
from sim.report.tables import Filled, tables
from sim.report.words import NOTHING, duration_of, place, short_op
from sim.timeline.clock import memory_clock, step_windows
from sim.timeline.holdings import Holding, grouped, held_at
from sim.timeline.memory import MemoryTimeline
from sim.timeline.stories import Moment, Story, stories, story
from sim.units import format_bytes, format_duration

SHOWN_LINES, SHOWN_CHANGES = 16, 3
LONGEST_OPERATOR = 20
PARTS = {"fwd": "forward", "bwd": "backward", "clip": "clip", "opt": "optimizer", "end": "end"}
"""Marks of a program, as people call what they end."""


@dataclass(frozen=True, slots=True)
class Played:
    """A strategy's worst rank with the clock of its memory: device axis, from the start of its last step."""

    outcome: Outcome
    memory: MemoryTimeline
    since_step_ns: Floats
    step_ns: float

    @classmethod
    def of(cls, outcome: Outcome) -> Played:
        lanes = shown_lanes(outcome)[outcome.ranks.index(outcome.worst)]
        memory = outcome.worst.shown
        begin, end = step_windows(lanes)[-1]
        return cls(outcome, memory, memory_clock(memory, lanes).device_ns - begin, end - begin)

    def event_at(self, time_ns: float) -> int:
        """The last memory event of the step at or before a time after its start. Raises RunError outside the step."""
        if not 0 <= time_ns <= self.step_ns:
            raise RunError(
                f"--time {format_duration(time_ns)}: the step of {self.outcome.name} takes {format_duration(self.step_ns)}"
            )
        first, last = self.memory.steps()[-1]
        found = int(np.searchsorted(self.since_step_ns[first:last], time_ns, "right")) - 1
        return first + max(found, 0)

    def mark(self, name: str) -> int:
        """The last memory event of a part of the step. Raises RunError for a part that it has not."""
        first, last = self.memory.steps()[-1]
        ends: dict[str, int] = {}
        for mark in self.memory.program.marks:
            part = PARTS.get(mark.name.partition(".")[2].rstrip("0123456789"))
            if part is not None and first < mark.memory_events <= last:
                ends[part] = mark.memory_events - 1
        if name not in ends:
            raise RunError(f"--at {name}: one of peak, {', '.join(ends)}")
        return ends[name]

    def when(self, moment: Moment) -> str:
        """When a moment is, from the start of the step."""
        if moment.step < 0:
            return "set-up"
        if moment.step < len(self.memory.steps()) - 1:
            return "earlier step"
        return format_duration(max(float(self.since_step_ns[moment.event]), 0.0))

    def counters(self, event: int) -> str:
        memory = self.memory
        rows: tuple[tuple[str, Ints], ...] = (
            ("allocated", memory.allocated_bytes),
            ("active", memory.active_bytes),
            ("reserved", memory.reserved_bytes),
        )
        return ", ".join(f"{format_bytes(int(counter[event]))} {name}" for name, counter in rows)


def show_moment(console: Console, played: Played, event: int, what: str) -> None:
    """Everything alive right after an event, alike allocations together."""
    memory = played.memory
    phase, path, operator = memory.program.where(int(memory.program.mem_where[event]))
    time = duration_of(max(float(played.since_step_ns[event]), 0.0) * 1e-9)
    where = f"{place(phase.name.lower(), path)} ({short_op(operator, phase.name.lower())})"
    console.print(Text.assemble((f"{_title(played)} {what}", "bold"), f", {time} into the step: {where}"))
    console.print(f"{played.counters(event)}\n")
    awaited = int(memory.active_bytes[event] - memory.allocated_bytes[event])
    show_holdings(console, played, held_at(memory, event), awaited)


def _title(played: Played) -> str:
    worst = f", {played.outcome.worst.name}" if len(played.outcome.ranks) > 1 else ""
    return f"{played.outcome.name}{worst}:"


def show_holdings(console: Console, played: Played, holdings: Sequence[Holding], awaited_bytes: int = 0) -> None:
    """A line per group: size, number, owner, maker, since when, until what. `awaited_bytes`: freed, not yet reusable."""
    lines = [_line(played, holding) for holding in holdings[:SHOWN_LINES]]
    rest = holdings[SHOWN_LINES:]
    if awaited_bytes > 0:
        lines.append((format_bytes(awaited_bytes), "", AWAITING_STREAM, *[""] * 3))
    if rest:
        count = sum(len(holding.stories) for holding in rest)
        lines.append((format_bytes(sum(h.bytes for h in rest)), f"{count:,}", "the rest", *[""] * 3))
    size, number, owner, maker, since, until = zip(*lines) if lines else [("nothing",), *[("",)] * 5]
    columns = [
        Filled("number", number),
        Filled("of", owner, "left"),
        Filled("made in", maker, "left"),
        Filled("at", since),
        Filled("held until", until, "left"),
    ]
    for table in tables(Filled("size", size, "left"), columns, console.width):
        console.print(table, "")


def _line(played: Played, holding: Holding) -> tuple[str, ...]:
    made, freed, one = holding.made, holding.freed, holding.stories[0]
    return (
        format_bytes(holding.bytes),
        f"{len(holding.stories):,}" if len(holding.stories) > 1 else f"#{one.handle}",
        one.owner.label,
        ": ".join(filter(None, (_place(made, holding.path), _operator(made)))),
        played.when(made),
        f"{_place(freed, holding.freed_path)}, {played.when(freed)}" if freed is not None else "stays",
    )


def _place(moment: Moment, path: str) -> str:
    """ "layers.0..31.attention backward"."""
    return place(moment.phase.name.lower(), path) if moment.phase != Phase.INIT else path or "set-up"


def _operator(moment: Moment) -> str:
    """The operator without its namespace, cut in its middle where it is long."""
    name = short_op(moment.operator, moment.phase.name.lower()).removeprefix("aten.")
    if name == "no operator":
        return ""
    half = LONGEST_OPERATOR // 2
    return name if len(name) <= LONGEST_OPERATOR else f"{name[: half - 1]}..{name[1 - half :]}"


def show_module(console: Console, played: Played, path: str) -> None:
    """What a module and those inside make in the step. Raises RunError where nothing is made there."""
    found = _made_in(played, path)
    kept = [one for one in found if one.made.phase == Phase.FORWARD and _outlives_forward(one)]
    console.print(Text.assemble((f"{_title(played)} {path}", "bold"), f" makes {len(found):,} storages in a step"))
    size = sum(one.block_bytes for one in kept)
    console.print(f"{format_bytes(size)} in {len(kept)} of them are kept from forward for later\n")
    show_holdings(console, played, grouped(found))


def _outlives_forward(one: Story) -> bool:
    return one.freed is None or one.freed.phase not in (Phase.FORWARD, Phase.LOSS) or one.freed.step > one.made.step


def _made_in(played: Played, path: str, option: str = "--module") -> list[Story]:
    steps = played.memory.steps()
    found = stories(played.memory, path, len(steps) - 1)
    if not found:
        known = sorted({name.split(".")[0] for name in played.memory.program.paths if name})
        raise RunError(f"{option} {path}: nothing is made there in a step; modules begin with {', '.join(known)}")
    return found


def show_tensor(console: Console, played: Played, name: str) -> None:
    """One storage's life by its number, or those of all that a module makes. Raises RunError."""
    if name.lstrip("#").isdigit():
        try:
            lives = [story(played.memory, int(name.lstrip("#")))]
        except IndexError:
            raise RunError(
                f"--tensor {name}: the run makes {int((played.memory.born < played.memory.played).sum()):,}"
            ) from None
    else:
        lives = _made_in(played, name, "--tensor")
    for one in lives:
        console.print(Text.assemble((f"#{one.handle}", "bold"), f" {one.owner.label}, {life(played, one)}"))


def life(played: Played, one: Story) -> str:
    """A storage's life in a sentence."""
    block = "" if one.block_bytes == one.bytes else f" in a block of {format_bytes(one.block_bytes)}"
    made = f"made in {_whole(one.made)} ({played.when(one.made)})"
    end = "alive at the end"
    if one.freed is not None:
        end = f"last held by {_whole(one.freed)} ({played.when(one.freed)})"
    return f"{format_bytes(one.bytes)}{block} at {one.address:#x}, {made}, {end}"


def _whole(moment: Moment) -> str:
    """ "layers.7.attention.wq backward: MmBackward0"."""
    operator = short_op(moment.operator, moment.phase.name.lower())
    where = _place(moment, moment.path)
    return where if operator == "no operator" else f"{where}: {operator}"


def show_effects(console: Console, outcome: Outcome, effects: Sequence[Effect], tried: int) -> None:
    """The changes that lower the peak most, each as it was played."""
    if not effects:
        console.print(f"None of the {tried} changes that were played lowers this peak by a hundredth.")
        return
    best = effects[:SHOWN_CHANGES]
    console.print(f"What lowers this peak, best of {tried} changes played:\n")
    rows = Filled("change", [effect.change.says for effect in best], "left")
    columns = [
        Filled("peak active", [_change(outcome.steady.active_bytes, e.outcome.steady.active_bytes) for e in best]),
        Filled(
            "peak reserved", [_change(outcome.steady.reserved_bytes, e.outcome.steady.reserved_bytes) for e in best]
        ),
        Filled("step", [_slower(outcome, effect.outcome) for effect in best]),
        Filled("fits", ["yes" if effect.outcome.fits else "no" for effect in best]),
        Filled("in the scenario", [effect.change.text for effect in best], "left"),
    ]
    for table in tables(rows, columns, console.width):
        console.print(table, "")


def _change(before: int, after: int) -> str:
    return f"{format_bytes(after)} ({(after - before) / before:+.0%})"


def _slower(before: Outcome, after: Outcome) -> str:
    if after.time is None:
        return NOTHING
    text = format_duration(after.time.step_ns)
    return (
        text
        if before.time is None
        else f"{text} ({(after.time.step_ns - before.time.step_ns) / before.time.step_ns:+.0%})"
    )
