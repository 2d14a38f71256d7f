"""What is measured: a `Case` is a piece of work with the call that does it, a `Reading` a figure read off the device."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim.cost.measured import Measurable, bare, work_to_dict

if TYPE_CHECKING:
    from calibration.measure.device import Device
    from calibration.measure.timing import Call

SCENARIO, DESIGN = "scenario", "design"


@dataclass(frozen=True, slots=True)
class Case:
    """One piece of work. `name` is the kernel's, as in a program; `variant` tells apart what the work does not (layout of
    a product, pageable memory both ways); `origin`: a scenario's shape or one of the covering design."""

    family: str
    work: Measurable
    build: Callable[[Device], Call]
    name: str = ""
    variant: str = ""
    origin: str = DESIGN
    bytes_needed: int = 0
    """Of device memory, for one set of operands."""

    @property
    def key(self) -> str:
        """Tells this case from all others, in one run and the next."""
        return json.dumps([self.family, self.name, self.variant, work_to_dict(bare(self.work))], sort_keys=True)

    @property
    def title(self) -> str:
        """For the progress bar."""
        ((kind, fields),) = work_to_dict(self.work).items()
        return f"{self.name or kind} {self.variant} {', '.join(f'{k}={v}' for k, v in fields.items())}".replace(
            "  ", " "
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """One figure under its dotted name (its unit stands at the end), and how it is read."""

    family: str
    figure: str
    read: Callable[[Device], Value | None]
    """None: there is nothing to read on this device."""
    origin: str = DESIGN

    @property
    def key(self) -> str:
        return json.dumps([self.family, self.figure])

    @property
    def title(self) -> str:
        return self.figure


@dataclass(frozen=True, slots=True)
class Value:
    """A figure's value with its spread as a share of it, and what else should be remembered."""

    value: float
    relative_spread: float = 0.0
    details: dict[str, Any] | None = None
