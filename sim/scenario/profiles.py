"""Cost profile and host framework of a scenario: names that exist, or a file of one's own, measured on such a device."""

from __future__ import annotations

import os
from pathlib import Path

from sim.hardware.catalogue import Cluster
from sim.scenario.document import Document
from sim.scenario.load import beside, read_document, read_text
from sim.scenario.names import FRAMEWORKS, PROFILES, is_own_profile
from sim.scenario.problems import ScenarioError
from sim.scenario.schema import HostSection


def check_names(document: Document, profile: str | None, host: HostSection | None, cluster: Cluster | None) -> None:
    """Cost profile and framework must exist."""
    assumed = f"assumed:{cluster.gpu.name}" if cluster else profile
    if profile is not None and is_own_profile(profile):
        _check_own_profile(document, profile, cluster)
    elif profile is not None and profile not in PROFILES and profile != assumed:
        message = "a profile of your own is named by its file, e.g. mine.yaml; or"
        document.problem(("profile",), message if "/" in profile else "", allowed=PROFILES)
    if host is not None and host.framework not in FRAMEWORKS:
        document.problem(("host", "framework"), "", allowed=FRAMEWORKS)


def _check_own_profile(document: Document, name: str, cluster: Cluster | None) -> None:
    """Its figures are read with the costs (sim.cost.own), which say what is wrong with them."""
    file = beside(document.origin(("profile",)), name)
    if not file.is_file():
        what = "is a directory: a file is expected" if file.is_dir() else "no such file"
        document.problem(("profile",), f"{what} ({file}); python -m sim calibrate writes one")
    elif cluster is not None and _measured_on(file) == "cpu":
        message = f"was measured on a CPU: its times are not those of {cluster.gpu.title}, which the scenario runs on"
        document.warning(("profile",), message)


def _measured_on(file: Path) -> str | None:
    """Kind of the device that a profile names; None where it names none."""
    try:
        device = read_document(read_text(file), str(file)).value(("device", "kind"))
    except (ScenarioError, OSError):
        return None
    return device if isinstance(device, str) else None


def resolve_profile(document: Document, name: str | None) -> str | None:
    """The profile's name; the path of a profile of one's own, absolute so that it holds wherever the set-up is played."""
    if name is None or not is_own_profile(name):
        return name
    return os.path.abspath(beside(document.origin(("profile",)), name))
