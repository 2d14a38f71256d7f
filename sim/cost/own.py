"""Profiles that a user measured (`python -m sim calibrate`), read from a YAML file of one's own.

The file has the groups of a shipped profile (gemm, attention, memory, ...), and besides: `device`, what was measured;
`base`, the shipped profile whose figures stand in for what was not; `host`, times of the training thread; `measured`,
single pieces of work with their times; `errors` and `calibration`, for people.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from sim.cost.figures import CostError, Figure, Figures, unknown
from sim.cost.gpu import Gpu
from sim.cost.host import load_framework
from sim.cost.measured import MeasuredTable, Timing, WorkError, work_from_dict
from sim.cost.profile import EVIDENCE, Profile, load_profile, profile_for, profile_names, read_figure
from sim.hardware.catalogue import UnknownGpu, find_gpu, gpu_names
from sim.scenario.document import Document
from sim.scenario.load import read_document, read_text
from sim.scenario.names import is_own_profile
from sim.scenario.problems import ScenarioError

GROUPS = ("link", "gemm", "attention", "memory", "collective", "inter_node", "p2p", "copy", "overlap", "host_link")
HOST = "host"
HEADINGS = ("description", "base", "device", "calibration", "errors", "measured")
MODEL_PROFILE = "h100-sxm"
"""Has every figure there is: the names that a file may give, and the base of a device that no shipped profile is for."""


class ProfileError(CostError):
    """A profile file that cannot be used; the message lists everything found, with lines."""


class ProfileProblems(ScenarioError):
    """Everything wrong with a profile file, told as with a scenario."""

    ending = "The profile is not used."


@dataclass(frozen=True, slots=True)
class OwnNode:
    """Around a device that is in no catalogue: the network is not known, its loopback is."""

    network_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class OwnDevice:
    """Facts of a device that is in no catalogue; `peaks` in FLOP/s by dtype, as the fastest product measured."""

    name: str
    kind: str
    sms: int
    peaks: Mapping[str, float]
    memory_bandwidth_bytes_per_s: float
    gpu_link: str
    gpu_link_bytes_per_s: float
    host_link: str
    host_link_bytes_per_s: float
    node: OwnNode

    def peak_flops_per_s(self, dtype: str) -> float:
        """Peak for a dtype; for one that was not measured, the fastest one's. Raises KeyError where there is none."""
        return self.peaks[dtype] if dtype in self.peaks else max(self.peaks.values())


def own_profile_for(gpu: Gpu, path: str | Path) -> Profile:
    """The profile in a file, for `gpu`: as measured where it was measured there (or on a device that is in no
    catalogue), else carried over and labelled scaled, without its measured shapes. Raises ProfileError."""
    profile = load_own_profile(Path(path))
    if not profile.gpus or gpu.name in profile.gpus:
        return profile
    figures = profile.figures.overlaid(profile.name, {}, profile.name)
    return Profile(profile.name, profile.description, (gpu.name,), figures)


def profile_named(name: str) -> Profile:
    """A profile that ships, or the file of one's own. Raises CostError."""
    return load_own_profile(Path(name)) if is_own_profile(name) else load_profile(name)


def load_own_profile(path: Path) -> Profile:
    """The profile in a file. Raises ProfileError."""
    try:
        return _load(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise ProfileError(f"{path}: {(error.strerror or 'unreadable').lower()}") from None


@cache
def _load(path: Path, changed_ns: int) -> Profile:
    """Once per version of the file."""
    try:
        document = read_document(read_text(path), str(path))
        profile = _profile(document, path)
        if profile is None or document.problems:
            raise ScenarioError(document.problems)
        return profile
    except ScenarioError as error:
        raise ProfileError(str(ProfileProblems(error.problems))) from None


def _profile(document: Document, path: Path) -> Profile | None:
    known = (*HEADINGS, *GROUPS, HOST)
    for key in document.data:
        if key not in known:
            document.unknown((key,), "no such group:", known)
    device = _device(document)
    own = dict(_figures(document))
    measured = MeasuredTable.of(_measured(document))
    if device is None or document.problems:
        return None
    base = _base(document, device)
    if base is None:
        return None
    description = str(document.data.get("description", f"measured on {device.name}"))
    catalogued = not isinstance(device, OwnDevice)
    carried = base.figures.by_name if catalogued else _assumed(base.figures, device.name)
    figures = Figures(path.name, {**carried, **own})
    gpus = (device.name,) if catalogued else ()
    return Profile(path.name, description, gpus, figures, device=device, measured=measured)


def _assumed(figures: Figures, name: str) -> dict[str, Figure]:
    """Another kind of device's figures, where this one has none of its own."""
    return {
        figure_name: replace(figure, label="assumed", source=f"not measured on {name}: as {figures.owner}", error="")
        for figure_name, figure in figures
    }


def _base(document: Document, device: Gpu) -> Profile | None:
    """The profile that `base` names, else the GPU's own, else one that has every figure."""
    name = document.data.get("base")
    if name is None:
        return load_profile(MODEL_PROFILE) if isinstance(device, OwnDevice) else profile_for(device)
    if name not in profile_names():
        document.problem(("base",), unknown("cost profile", str(name), profile_names()), show=False)
        return None
    return load_profile(name)


def _device(document: Document) -> Gpu | None:
    entry = document.data.get("device")
    if not isinstance(entry, dict):
        document.problem(("device",), "what was measured is expected: {gpu: h100-sxm-80gb}, or the facts of the device")
        return None
    if entry.get("gpu") is not None:
        try:
            return find_gpu(str(entry["gpu"]))
        except UnknownGpu:
            document.problem(("device", "gpu"), "", allowed=gpu_names())
            return None
    for key in ("name", "sms", "peaks", "memory_bandwidth_bytes_per_s"):
        if key not in entry:
            document.problem(("device", key), "is missing (as `gpu` is, which would stand for all facts)", show=False)
    peaks = entry.get("peaks")
    peaks = peaks if isinstance(peaks, dict) else {}
    numbers: dict[tuple[str, ...], Any] = {
        **{("peaks", dtype): value for dtype, value in peaks.items()},
        **{(key,): value for key, value in entry.items() if key == "sms" or key.endswith("_per_s")},
    }
    for place, value in numbers.items():
        if not _is_positive(value):
            document.problem(("device", *place), "a number above 0 is expected")
    if not peaks:
        document.problem(("device", "peaks"), "FLOP/s by dtype are expected, e.g. {fp32: 1.0e+11}", show=False)
    if document.problems:
        return None
    return own_device(entry)


def own_device(entry: Mapping[str, Any]) -> OwnDevice:
    """The device of a checked entry; its link to the host is as fast as its memory where nobody says."""
    bandwidth = float(entry["memory_bandwidth_bytes_per_s"])
    host = float(entry.get("host_link_bytes_per_s", bandwidth))
    return OwnDevice(
        name=str(entry["name"]),
        kind=str(entry.get("kind", "cuda")),
        sms=int(entry["sms"]),
        peaks={dtype: float(value) for dtype, value in entry["peaks"].items()},
        memory_bandwidth_bytes_per_s=bandwidth,
        gpu_link="none",
        gpu_link_bytes_per_s=0.0,
        host_link=str(entry.get("host_link", "none")),
        host_link_bytes_per_s=host,
        node=OwnNode(float(entry.get("network_bytes_per_s", host))),
    )


def _figures(document: Document) -> Iterator[tuple[str, Figure]]:
    """Every figure of the groups; what is wrong with one is noted with its line."""
    for group in (*GROUPS, HOST):
        if group in document.data:
            entry = document.data[group]
            if not isinstance(entry, dict):
                document.problem((group,), "figures by name are expected")
                continue
            yield from _group(document, (group,), entry, {})


def _group(
    document: Document, path: tuple[str, ...], group: Mapping[str, Any], shared: Mapping[str, Any]
) -> Iterator[tuple[str, Figure]]:
    shared = {**shared, **{key: group[key] for key in EVIDENCE if key in group}}
    for key, entry in group.items():
        place = (*path, str(key))
        if key in EVIDENCE:
            continue
        if isinstance(entry, dict) and "value" not in entry:
            yield from _group(document, place, entry, shared)
            continue
        leaf = dict(entry) if isinstance(entry, dict) else {"value": entry}
        known = _leaf_names()[path[0]]
        if key not in known:
            document.unknown(place, f"no such figure; {', '.join(sorted(known))} are known", tuple(sorted(known)))
            continue
        try:
            figure = read_figure("", {**shared, **leaf})
        except CostError as error:
            document.problem(place, str(error).removeprefix(": "), show=not isinstance(entry, dict))
            continue
        if figure.value < 0:
            document.problem(place, "a number of at least 0 is expected", show=not isinstance(entry, dict))
            continue
        yield ".".join(place), figure


@cache
def _leaf_names() -> dict[str, set[str]]:
    """Last parts of the names of all figures, by group."""
    names: dict[str, set[str]] = {group: set() for group in (*GROUPS, HOST)}
    names["host_link"] = {"both_directions", "half_gb_per_s"}
    names["overlap"] = {"copy_share"}
    every = [name for profile in profile_names() for name, _ in load_profile(profile).figures]
    for name in (*every, *(f"{HOST}.{name}" for name, _ in load_framework("eager").figures)):
        group, _, rest = name.partition(".")
        if group in names:
            names[group].add(rest.rpartition(".")[2])
    return names


def _measured(document: Document) -> Iterator[tuple[str, Any, Timing]]:
    entries = document.data.get("measured", [])
    if not isinstance(entries, list):
        document.problem(("measured",), "a list of pieces of work with their times is expected")
        return
    for number, entry in enumerate(entries):
        place = ("measured", number)
        if not isinstance(entry, dict) or not _is_positive(entry.get("ns")):
            document.problem(place, "a piece of work with its time in ns, above 0, is expected")
            continue
        rest = {key: value for key, value in entry.items() if key not in ("kernel", "ns", "spread")}
        spread = entry.get("spread", 0.0)
        try:
            work = work_from_dict(rest)
        except WorkError as error:
            document.problem(place, str(error))
            continue
        if not isinstance(spread, int | float) or spread < 0:
            document.problem((*place, "spread"), "a share of at least 0 is expected")
            continue
        yield (
            str(entry.get("kernel", "")),
            work,
            Timing(round(entry["ns"]), max(float(spread), Timing(1).relative_sigma)),
        )


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
