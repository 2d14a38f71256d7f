"""Who holds memory: allocations that are alike (same owner, maker and end) as one line."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from sim.program.program import Owner, Phase
from sim.timeline.memory import MemoryTimeline
from sim.timeline.stories import Moment, Story, story

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, slots=True)
class Holding:
    """Alike allocations. `made` and `freed` are the first maker's and the last end's moments (freed None: some never).

    path, freed_path: their modules, numbers as ranges: "layers.0..31.attention".
    """

    stories: tuple[Story, ...]
    path: str
    made: Moment
    freed: Moment | None
    freed_path: str

    @property
    def owner(self) -> Owner:
        return self.stories[0].owner

    @property
    def bytes(self) -> int:
        """Of their blocks; those of one moment sum to the allocated bytes."""
        return sum(story.block_bytes for story in self.stories)


def held_at(memory: MemoryTimeline, event: int) -> list[Holding]:
    """What is alive right after a memory event, the largest first."""
    return grouped(story(memory, handle) for handle in memory.live_at(event).tolist())


def grouped(stories: Iterable[Story]) -> list[Holding]:
    """Stories of alike allocations together, the largest first."""
    groups: dict[tuple[object, ...], list[Story]] = defaultdict(list)
    for one in stories:
        groups[(one.owner, *_kind(one.made), *_kind(one.freed))].append(one)
    holdings = [_holding(group) for group in groups.values()]
    return sorted(holdings, key=lambda holding: (-holding.bytes, holding.made.event))


def _kind(moment: Moment | None) -> tuple[Phase | None, str, str]:
    """What moments of alike layers share."""
    return (moment.phase, NUMBER.sub("*", moment.path), moment.operator) if moment else (None, "", "")


def _holding(group: list[Story]) -> Holding:
    ends = [one.freed for one in group if one.freed is not None]
    return Holding(
        stories=tuple(group),
        path=ranged(one.made.path for one in group),
        made=min((one.made for one in group), key=lambda moment: moment.event),
        freed=max(ends, key=lambda moment: moment.event) if len(ends) == len(group) else None,
        freed_path=ranged(moment.path for moment in ends),
    )


def ranged(paths: Iterable[str]) -> str:
    """Paths that differ in numbers alone as one: layers.0.norm, layers.1.norm, ... -> "layers.0..31.norm"."""
    columns = list(zip(*(path.split(".") for path in dict.fromkeys(paths))))
    return ".".join(_range(column) for column in columns)


def _range(parts: tuple[str, ...]) -> str:
    if len(set(parts)) == 1:
        return parts[0]
    numbers = sorted({int(part) for part in parts})
    dense = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}..{numbers[-1]}" if dense else f"{numbers[0]}..{numbers[-1]} ({len(numbers)})"
