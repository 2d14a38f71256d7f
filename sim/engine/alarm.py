"""A sleep that can be cut short, and an event that comes after everything else of its instant."""

from __future__ import annotations

from collections.abc import Callable

from simpy import Environment
from simpy.events import Event, EventPriority, Timeout

LATE = EventPriority(2)  # SimPy's own priorities are 0 (urgent) and 1 (normal)


class Alarm:
    """The sleeping process does `yield alarm.until(time)` and then asks `alarm.rung`; others call `alarm.ring()`.

    No `Interrupt`: two of them in one instant would hit the sleeper in the wrong place. Ringing moves the sleeper to an
    event of now; the old timeout fires for nobody.
    """

    __slots__ = ("_env", "_sleep", "rung")

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._sleep: Event | None = None
        self.rung = False

    def until(self, time_ns: float | None = None) -> Event:
        """The event to yield: due at a time, or at a ring only."""
        self.rung = False
        env = self._env
        if time_ns is None:
            self._sleep = Event(env)
        else:
            now_ns = env.now
            self._sleep = Timeout(env, time_ns - now_ns if time_ns > now_ns else 0.0)
        return self._sleep

    def ring(self) -> None:
        """Wake the sleeper now. Nothing happens if nobody sleeps or it is waking already."""
        sleep = self._sleep
        if sleep is not None and sleep.callbacks and not self.rung:
            wake = Event(self._env)
            wake.callbacks, sleep.callbacks = sleep.callbacks, []
            self._sleep, self.rung = wake.succeed(), True


class AtEndOfInstant(Event):
    """Calls back once, now, but after all other events of this time that are known by then."""

    __slots__ = ()

    def __init__(self, env: Environment, call: Callable[[], None]) -> None:
        super().__init__(env)
        self.callbacks.append(lambda _: call())
        self._ok, self._value = True, None
        env.schedule(self, LATE)
