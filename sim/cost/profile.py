"""Cost profiles: one YAML file per GPU in `profiles/`, each number with label and source.

A file may say `like: <profile>`: it then carries over that profile's figures, labelled scaled, under its own. A GPU
without a file gets the figures of the nearest generation (`assumed_profile`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, cast

from ruamel.yaml import YAML

from sim.cost.figures import LABELS, CostError, Figure, Figures, Label, carry, unknown
from sim.cost.gpu import Gpu, fabric_bytes_per_s, tensor_peak_flops_per_ns

EVIDENCE = ("label", "source", "error")
NOTHING: Mapping[str, str] = MappingProxyType({})

HOPPER_FLOPS_PER_S = 700e12
"""Dense 16-bit peak from which a GPU without a profile is taken for Hopper or later (H100 PCIe: 756, MI250X: 383)."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Figures for one GPU; `gpus` are the catalogue names that use it when no profile is named."""

    name: str
    description: str
    gpus: tuple[str, ...]
    figures: Figures


def profile_names() -> list[str]:
    """Names of the profiles that ship with the package."""
    return sorted(p.name.removesuffix(".yaml") for p in files(__package__).joinpath("profiles").iterdir())


@cache
def load_profile(name: str) -> Profile:
    """The shipped profile of that name. Raises CostError for an unknown name or a malformed file."""
    if name not in profile_names():
        raise CostError(unknown("cost profile", name, profile_names()))
    document = read_yaml(f"profiles/{name}.yaml")
    own = dict(flatten(name, {k: v for k, v in document.items() if k not in ("description", "gpus", "like")}))
    if "like" in document:
        figures = load_profile(document["like"]).figures.overlaid(name, own, was=document["like"])
    else:
        figures = Figures(name, own)
    return Profile(name, document["description"], tuple(document["gpus"]), figures)


def profile_for(gpu: Gpu, name: str | None = None) -> Profile:
    """The profile named, else the one that lists this GPU, else one assumed from the datasheet.

    A profile of another GPU may be named on purpose; its figures are then labelled scaled.
    """
    listing = next((p for p in map(load_profile, profile_names()) if gpu.name in p.gpus), None)
    if name == assumed_name(gpu) or (name is None and listing is None):
        return assumed_profile(gpu)
    if listing is not None and name in (None, listing.name):
        return listing
    chosen = load_profile(name or "")
    return Profile(chosen.name, chosen.description, (gpu.name,), chosen.figures.overlaid(chosen.name, {}, chosen.name))


def assumed_name(gpu: Gpu) -> str:
    return f"assumed:{gpu.name}"


def assumed_profile(gpu: Gpu) -> Profile:
    """A profile for a GPU without a file, from its datasheet.

    Rule: fractions of peak (matrix products, attention, memory), fixed times and tile costs are those of the H100 from
    a 16-bit peak of 700 TFLOP/s on, else of the A100; the fraction for matrix products is the GPU's own where
    `gemm_rates.yaml` has one; bandwidths of collectives and sends inside a node scale with what joins its GPUs,
    those of host copies with the host link. The dependence on shapes transfers between GPUs (4-6 % after one number
    per GPU), absolute rates do not (15-30 %; COSTS.md 1.3): one measured GEMM rate removes most of that error.
    """
    base = load_profile("h100-sxm" if tensor_peak_flops_per_ns(gpu) * 1e9 >= HOPPER_FLOPS_PER_S else "a100-sxm-80")
    fabric = fabric_bytes_per_s(gpu) / (base.figures["link.gpu_gb_per_s"] * 1e9)
    host = gpu.host_link_bytes_per_s / (base.figures["link.host_gb_per_s"] * 1e9)
    own = {
        "link.gpu_gb_per_s": Figure(fabric_bytes_per_s(gpu) / 1e9, "published", "datasheet, one direction"),
        "link.host_gb_per_s": Figure(gpu.host_link_bytes_per_s / 1e9, "published", "datasheet, one direction"),
    }
    for name, figure in base.figures:
        if name.startswith(("collective.", "p2p.")) and name.endswith("_gb_per_s"):
            own[name] = scale(figure, fabric, f"{base.name} x link bandwidth")
        elif name.startswith("copy.") and name.endswith("_gb_per_s"):
            own[name] = scale(figure, host, f"{base.name} x host link bandwidth")
    own.update(dict(flatten("gemm_rates", {"gemm": read_yaml("gemm_rates.yaml").get(gpu.name, {})})))
    description = f"No profile of {gpu.name}: fractions of peak as {base.name}, peaks and links from the datasheet."
    return Profile(
        assumed_name(gpu), description, (gpu.name,), base.figures.overlaid(assumed_name(gpu), own, base.name)
    )


def scale(figure: Figure, factor: float, rule: str) -> Figure:
    """The figure times a ratio of datasheet figures."""
    carried = carry(figure, f"{rule} ({factor:.3g})")
    return replace(carried, value=figure.value * factor)


def read_yaml(path: str) -> dict[str, Any]:
    """A YAML file of this package as plain dicts. Raises ruamel's error for duplicate keys."""
    text = files(__package__).joinpath(path).read_text(encoding="utf-8")
    return cast("dict[str, Any]", YAML(typ="safe", pure=True).load(text))


def flatten(
    owner: str, group: Mapping[str, Any], prefix: str = "", shared: Mapping[str, str] = NOTHING
) -> Iterator[tuple[str, Figure]]:
    """Figures of a nested mapping under dotted names.

    A leaf is a number, or {value, label, source, error}; what it leaves out is said once by a group around it. A leaf
    with its own source does not inherit a fit error. Raises CostError for a leaf without value, label or source.
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
        inherited = {k: v for k, v in shared.items() if k != "error" or "source" not in leaf}
        yield name, read_figure(f"{owner}: {name}", {**inherited, **leaf})


def read_figure(place: str, leaf: Mapping[str, Any]) -> Figure:
    """A figure from its mapping; `place` starts the message of the CostError."""
    complete = {"value", "label", "source"} <= set(leaf) <= {"value", *EVIDENCE}
    if not complete or leaf["label"] not in LABELS or not isinstance(leaf["value"], int | float):
        raise CostError(f"{place}: a number with label ({', '.join(LABELS)}) and source is expected, and perhaps error")
    label = cast(Label, leaf["label"])
    return Figure(float(leaf["value"]), label, leaf["source"], leaf.get("error", ""))
