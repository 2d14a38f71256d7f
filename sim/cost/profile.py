"""Cost profiles: one YAML file per GPU in `profiles/`, each number with label and source.

A file may say `like: <profile>`: it then carries over that profile's figures, labelled scaled, under its own.
`scaled_by: {gpu_link: x, host_link: y}` beside it states the ratio of the datasheets' link bandwidths: bandwidths of
collectives and sends inside a node are multiplied by x, those of host copies by y; `like_sigma` is the uncertainty
that carrying over adds. A GPU without a file gets the figures of the nearest generation (`assumed_profile`). The
files are written by `calibration.fit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, cast

from ruamel.yaml import YAML

from sim.cost.figures import CARRIED_SIGMA, LABELS, CostError, Figure, Figures, Label, carry, unknown
from sim.cost.gpu import Gpu, fabric_bytes_per_s, tensor_peak_flops_per_ns
from sim.cost.measured import NOTHING_MEASURED, MeasuredTable

EVIDENCE = ("label", "source", "error", "sigma")
HEADER = ("description", "gpus", "like", "like_sigma", "scaled_by")
NOTHING: Mapping[str, Any] = MappingProxyType({})

GIVEN_SIGMA = 0.04
"""Of a GEMM rate measured by the user: shapes differ by 4-6 % once the rate is right (COSTS.md 1.3)."""
HOPPER_FLOPS_PER_S = 700e12
"""Dense 16-bit peak from which a GPU without a profile is taken for Hopper or later (H100 PCIe: 756, MI250X: 383)."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Figures for one GPU; `gpus` are the catalogue names that use it when no profile is named.

    A profile of one's own (`sim.cost.own`) has the `device` that was measured, and times of single pieces of work.
    """

    name: str
    description: str
    gpus: tuple[str, ...]
    figures: Figures
    device: Gpu | None = None
    measured: MeasuredTable = NOTHING_MEASURED


def profile_names() -> list[str]:
    """Names of the profiles that ship with the package."""
    return sorted(p.name.removesuffix(".yaml") for p in files(__package__).joinpath("profiles").iterdir())


@cache
def load_profile(name: str) -> Profile:
    """The shipped profile of that name. Raises CostError for an unknown name or a malformed file."""
    if name not in profile_names():
        raise CostError(unknown("cost profile", name, profile_names()))
    document = read_yaml(f"profiles/{name}.yaml")
    own = dict(flatten(name, {k: v for k, v in document.items() if k not in HEADER}))
    figures = Figures(name, own)
    if "like" in document:
        base, ratio = load_profile(document["like"]), document.get("scaled_by", {})
        links = scaled_links(base, ratio.get("gpu_link", 1), ratio.get("host_link", 1))
        added = float(document.get("like_sigma", CARRIED_SIGMA))
        figures = base.figures.overlaid(name, {**links, **own}, was=base.name, added_sigma=added)
    return Profile(name, document["description"], tuple(document["gpus"]), figures)


def with_gemm_efficiency(profile: Profile, efficiency: float) -> Profile:
    """The profile with a GEMM rate of one's own: `efficiency` is the fraction of the dense peak that a large product
    sustains. Raises CostError unless 0 < efficiency <= 1."""
    if not 0 < efficiency <= 1:
        raise CostError(f"GEMM efficiency {efficiency:g}: a fraction of the dense peak is expected, 0 to 1")
    own = Figure(efficiency, "measured", "given by the user", sigma=GIVEN_SIGMA)
    figures = Figures(profile.name, {**profile.figures.by_name, "gemm.efficiency": own})
    return replace(profile, figures=figures)


def profile_for(gpu: Gpu, name: str | None = None) -> Profile:
    """The profile named, else the one that lists this GPU, else one assumed from the datasheet.

    A profile of another GPU may be named on purpose; its figures are then labelled scaled.
    """
    listing = next((p for p in map(load_profile, _mentioning(gpu.name)) if gpu.name in p.gpus), None)
    if name == assumed_name(gpu) or (name is None and listing is None):
        return assumed_profile(gpu)
    if listing is not None and name in (None, listing.name):
        return listing
    chosen = load_profile(name or "")
    return Profile(chosen.name, chosen.description, (gpu.name,), chosen.figures.overlaid(chosen.name, {}, chosen.name))


def _mentioning(word: str) -> list[str]:
    """Names of the profiles whose text has the word: the others need no parsing."""
    return [name for name in profile_names() if word in _text(f"profiles/{name}.yaml")]


def assumed_name(gpu: Gpu) -> str:
    return f"assumed:{gpu.name}"


def assumed_profile(gpu: Gpu) -> Profile:
    """A profile for a GPU without a file, from its datasheet.

    Rule: fractions of peak (matrix products, attention, memory), fixed times and tile costs are those of the H100 from
    a 16-bit peak of 700 TFLOP/s on, else of the A100; bandwidths of collectives and sends inside a node scale with
    what joins its GPUs, those of host copies with the host link. The dependence on shapes transfers between GPUs
    (4-6 % after one number per GPU), absolute rates do not (15-30 %; COSTS.md 1.3): one measured GEMM rate removes
    most of that error.
    """
    base = load_profile("h100-sxm" if tensor_peak_flops_per_ns(gpu) * 1e9 >= HOPPER_FLOPS_PER_S else "a100-sxm-80")
    fabric = fabric_bytes_per_s(gpu) / (base.figures["link.gpu_gb_per_s"] * 1e9)
    host = gpu.host_link_bytes_per_s / (base.figures["link.host_gb_per_s"] * 1e9)
    own = {
        "link.gpu_gb_per_s": Figure(fabric_bytes_per_s(gpu) / 1e9, "published", "datasheet, one direction"),
        "link.host_gb_per_s": Figure(gpu.host_link_bytes_per_s / 1e9, "published", "datasheet, one direction"),
    }
    own.update(scaled_links(base, fabric, host))
    description = f"No profile of {gpu.name}: fractions of peak as {base.name}, peaks and links from the datasheet."
    return Profile(
        assumed_name(gpu), description, (gpu.name,), base.figures.overlaid(assumed_name(gpu), own, base.name)
    )


def scaled_links(base: Profile, gpu_link: float, host_link: float) -> dict[str, Figure]:
    """Link bandwidths of `base` for a GPU whose datasheet has `gpu_link` and `host_link` times its link bandwidths."""
    scaled = {}
    for name, figure in base.figures:
        if name.startswith(("collective.", "p2p.")) and name.endswith("_gb_per_s") and gpu_link != 1:
            scaled[name] = scale(figure, gpu_link, f"{base.name} x link bandwidth")
        elif name.startswith("copy.") and name.endswith("_gb_per_s") and host_link != 1:
            scaled[name] = scale(figure, host_link, f"{base.name} x host link bandwidth")
    return scaled


def scale(figure: Figure, factor: float, rule: str) -> Figure:
    """The figure times a ratio of datasheet figures."""
    carried = carry(figure, f"{rule} ({factor:.3g})")
    return replace(carried, value=figure.value * factor)


def read_yaml(path: str) -> dict[str, Any]:
    """A YAML file of this package as plain dicts. Raises ruamel's error for duplicate keys."""
    return cast("dict[str, Any]", YAML(typ="safe", pure=True).load(_text(path)))


def _text(path: str) -> str:
    return files(__package__).joinpath(path).read_text(encoding="utf-8")


def flatten(
    owner: str, group: Mapping[str, Any], prefix: str = "", shared: Mapping[str, Any] = NOTHING
) -> Iterator[tuple[str, Figure]]:
    """Figures of a nested mapping under dotted names.

    A leaf is a number, or {value, label, source, error, sigma}; what it leaves out is said once by a group around it.
    A leaf with its own source inherits neither fit error nor sigma. Raises CostError for a leaf without value, label
    or source.
    """
    shared = {**shared, **{key: group[key] for key in EVIDENCE if key in group}}
    for key, entry in group.items():
        if key in EVIDENCE:
            continue
        name = f"{prefix}{key}"
        if isinstance(entry, Mapping) and "value" not in entry:
            yield from flatten(owner, entry, f"{name}.", shared)
            continue
        leaf = dict(entry) if isinstance(entry, Mapping) else {"value": entry}
        own_source = "source" in leaf
        inherited = {k: v for k, v in shared.items() if not (own_source and k in ("error", "sigma"))}
        yield name, read_figure(f"{owner}: {name}", {**inherited, **leaf})


def read_figure(place: str, leaf: Mapping[str, Any]) -> Figure:
    """A figure from its mapping; `place` starts the message of the CostError."""
    complete = {"value", "label", "source"} <= set(leaf) <= {"value", *EVIDENCE}
    numbers = [leaf.get("value"), leaf.get("sigma", 0)]
    if not complete or leaf["label"] not in LABELS or not all(isinstance(number, int | float) for number in numbers):
        known = ", ".join(LABELS)
        raise CostError(f"{place}: a number with label ({known}) and source is expected, and perhaps error and sigma")
    label = cast(Label, leaf["label"])
    return Figure(float(leaf["value"]), label, leaf["source"], leaf.get("error", ""), leaf.get("sigma"))
