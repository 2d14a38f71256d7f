"""What a rank's kernels and transfers do to each other: how contended its GPU is, and whether it computes."""

from __future__ import annotations

from sim.engine.alarm import Alarm
from sim.engine.links import Fabric, Flow


class Gpu:
    """`level` is the highest level of a meeting that runs here, 0 for none; `busy` counts streams inside a burst."""

    __slots__ = ("_bursts", "_fabric", "_meetings", "busy", "flows", "level")

    def __init__(self, fabric: Fabric, levels: int) -> None:
        self._fabric = fabric
        self._meetings = [0] * levels  # that run here, by level
        self._bursts: dict[Alarm, None] = {}  # of the streams inside one
        self.flows: dict[Flow, None] = {}  # that computing slows
        self.level = 0
        self.busy = 0

    def contend(self, level: int, change: int) -> None:
        """One meeting more (+1) or less (-1) at this level. If it moves the level, rings streams inside a burst."""
        self._meetings[level] += change
        highest = max((at for at, running in enumerate(self._meetings) if running), default=0)
        if highest != self.level:
            self.level = highest
            for alarm in self._bursts:
                alarm.ring()

    def start_burst(self, alarm: Alarm) -> None:
        """A stream enters a burst; from now on its alarm rings when the level moves."""
        self._bursts[alarm] = None
        self.busy += 1
        if self.busy == 1 and self.flows:
            self._fabric.touch(self.flows)

    def end_burst(self, alarm: Alarm) -> None:
        """A stream leaves its burst."""
        del self._bursts[alarm]
        self.busy -= 1
        if self.busy == 0 and self.flows:
            self._fabric.touch(self.flows)
