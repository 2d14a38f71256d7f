"""What a strategy's step is bound by: memory where it does not fit, else what its compute stream waits for most."""

from __future__ import annotations

from sim.report.summary import StrategySummary
from sim.report.words import NOTHING, place

WORTH_NAMING = 0.1
"""Of the step: a shorter wait leaves the step bound by compute."""


def bound_by(s: StrategySummary) -> str:
    """ "memory in loss backward", "compute", or the cause of the longest wait with its share of the step."""
    if not s.fits:
        place_of = s.oom if s.oom is not None else s.peak
        return f"memory in {place(place_of.phase, place_of.layer)}"
    if not s.step_time_s:
        return NOTHING
    waits = {name: seconds / s.step_time_s for name, seconds in waits_s(s).items()}
    name = max(waits, key=lambda cause: waits[cause])
    return f"{name} ({waits[name]:.0%})" if waits[name] >= WORTH_NAMING else "compute"


def waits_s(s: StrategySummary) -> dict[str, float]:
    """Seconds of a step in which compute waits, by cause; of all pipeline ranks on average for the bubble."""
    bubble = s.bubble_fraction or 0.0
    return {
        "network": s.exposed_communication_s or 0.0,
        "PCIe": (s.offload.exposed_copies_s or 0.0) if s.offload is not None else 0.0,
        "bubble": (s.step_time_s or 0.0) * bubble / (1 + bubble),
        "host": s.host_bound_s or 0.0,
    }
