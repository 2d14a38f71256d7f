"""Micro-batches of a step, one after the other, whose gradients add up. The middle ones are alike: two are recorded."""

from __future__ import annotations

from collections.abc import Iterator

from sim.runtime.recorder import Recorder
from sim.runtime.schedules.folding import WORTH
from sim.runtime.unfold import Folded

RECORDED = 7
"""The first makes gradients, and buckets of gradients are made anew in the second; up to the fourth may wait for events
of these. Then two periods, and the last."""


class MicroBatches:
    """The micro-batches of every step that are recorded: all `count`, or with `folds` few; `folded` says then for
    `unfold` where the others belong."""

    def __init__(self, recorder: Recorder, count: int, folds: bool) -> None:
        self.count = count
        self.recorded = RECORDED if folds and WORTH * count >= RECORDED else count
        self.folded: list[Folded] = []
        self._recorder = recorder

    def __iter__(self) -> Iterator[int]:
        """Their numbers, as if there were no others, while they are recorded."""
        passed = []
        for number in range(self.recorded):
            passed.append(self._recorder.position())
            yield number
        if self.recorded < self.count:
            oldest = passed[2]._replace(recorded=passed[1].recorded)
            before, begin, end = passed[4:7]
            times = self.count - self.recorded
            self.folded.append(Folded(len(self.folded), oldest, before, begin, end, times, shift=1))

    def is_last(self, number: int) -> bool:
        return number == self.recorded - 1
