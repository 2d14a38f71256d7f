"""A device whose times are given: what is measured on it is known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="measures with PyTorch")

from calibration.measure.case import Case  # noqa: E402
from calibration.measure.device import DeviceInfo  # noqa: E402
from calibration.measure.points import Point, timed  # noqa: E402
from calibration.measure.timing import Call, Measured  # noqa: E402


@dataclass(slots=True)
class Given:
    """A call of known time."""

    ns: float

    def __call__(self) -> None:
        """Takes no time here."""


@dataclass(slots=True)
class FakeDevice:
    """Its clock goes on by what the calls take; `interrupt_at`: Ctrl-C at that call."""

    name: str = "cuda"
    cold: bool = True
    title: str = "NVIDIA H100 80GB HBM3"
    free: int = 80 << 30
    seconds: float = 0.0
    calls: int = 0
    interrupt_at: int | None = None
    rotation_bytes: int = 0
    state_now: dict[str, float] = field(default_factory=dict)

    @property
    def torch_device(self) -> Any:
        return torch.device("meta")

    def synchronize(self) -> None:
        """Nothing runs."""

    def time_ns(self, call: Call, rounds: int) -> list[float]:
        assert isinstance(call, Given)
        self.calls += 1
        if self.interrupt_at is not None and self.calls >= self.interrupt_at:
            raise KeyboardInterrupt
        self.seconds += call.ns * rounds / 1e9
        return [call.ns] * rounds

    def free_bytes(self) -> int:
        return self.free

    def info(self) -> DeviceInfo:
        return DeviceInfo(self.name, self.title, "2.14", "2026-01-01", 1, 132, 80 << 30, 50 << 20, capability=(9, 0))

    def state(self) -> dict[str, float]:
        return self.state_now

    def kernels(self, call: Call) -> list[str]:
        return ["a_kernel"]

    def clock(self) -> float:
        return self.seconds


def given(cases: Iterable[Case], ns: Callable[[Any], float]) -> list[Case]:
    """The cases with calls that take `ns(work)`."""
    return [replace(case, build=lambda device, case=case: Given(ns(case.work))) for case in cases]  # type: ignore[misc]


def points_of(cases: Iterable[Case], ns: Callable[[Any], float]) -> list[Point]:
    """Points as a perfect measurement would give them."""
    return [timed(case, Measured.of([ns(case.work)] * 3)) for case in cases]
