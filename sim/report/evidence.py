"""What each kind of figure rests on: recordings, measurements, assumptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sim.api import cost_model
from sim.model.config import ChainConfig
from sim.scenario.setup import Setup
from sim.scenario.versions import RECORDED_ALLOCATOR, RECORDED_AUTOGRAD, minor_of

ESSENTIAL = ("attention", "collective", "copy", "gemm", "memory")
"""Groups of figures without which a profile of one's own rests on somebody else's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """How far a figure can be trusted: exact, close, calibrated, published, datasheet, given or assumed; and who says so."""

    label: str
    source: str


def evidence(setup: Setup) -> dict[str, Evidence]:
    """What each kind of figure rests on."""
    cluster = setup.cluster
    labels = {"bytes": _byte_evidence(setup), "time": _time_evidence(setup)}
    for figure in ("usable_memory_bytes", "context_bytes", "communicator_bytes", "host_memory_bytes", "drives"):
        source = cluster.source(figure)
        name = "usable_device_bytes" if figure == "usable_memory_bytes" else figure
        labels[name] = Evidence(label=source.label, source=source.text)
    return labels


def _byte_evidence(setup: Setup) -> Evidence:
    """Exact for the versions that were recorded, else close: the rules of the nearest one are played."""
    minor, version = minor_of(setup.torch), setup.torch
    if isinstance(setup.model, ChainConfig):
        exact = minor in RECORDED_ALLOCATOR
        source = f"Sizes of the scenario in PyTorch {version}'s caching allocator"
        rules = _versions(RECORDED_ALLOCATOR)
    else:
        exact = minor in RECORDED_ALLOCATOR and minor in RECORDED_AUTOGRAD
        source = f"Allocations and caching allocator as PyTorch {version}'s, where recordings cover the case"
        rules = f"allocations of {_versions(RECORDED_AUTOGRAD)}, the allocator of {_versions(RECORDED_ALLOCATOR)}"
    if exact:
        return Evidence(label="exact", source=source)
    return Evidence(label="close", source=f"Rules of the versions nearest to PyTorch {version}; recorded: {rules}")


def _versions(recorded: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in recorded)


def _time_evidence(setup: Setup) -> Evidence:
    """Calibrated if the user measured the device (what was not is named), else assumed: figures of different machines."""
    if isinstance(setup.model, ChainConfig):
        return Evidence(label="given", source="Durations of the scenario")
    cost = cost_model(setup)
    counts = Counter(figure.label for _, figure in cost.labels())
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    profile = cost.profile
    if profile.device is not None:
        measured = {name.partition(".")[0] for name, figure in profile.figures if figure.label == "measured"}
        missing = [group for group in ESSENTIAL if group not in measured]
        place = f"{profile.name}, measured on {profile.device.name}, {len(profile.measured)} shapes exactly"
        rest = f"; not measured: {', '.join(missing)}" if missing else ""
        return Evidence(label="calibrated", source=f"Cost profile {place}: {kinds}{rest}")
    label = "calibrated" if set(counts) == {"measured"} else "assumed"
    return Evidence(label=label, source=f"Cost profile {cost.profile.name}, framework {setup.host.framework}: {kinds}")
