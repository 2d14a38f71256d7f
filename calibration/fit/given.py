"""The list of profiles (`given.yaml`): header and figures that no script fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from sim.cost.figures import Figure
from sim.cost.gpu import fabric_bytes_per_s
from sim.cost.profile import HEADER, flatten
from sim.hardware.catalogue import Gpu, find_gpu

HEADINGS = (*HEADER, "links")
GIVEN: dict[str, dict[str, Any]] = YAML(typ="safe", pure=True).load(
    Path(__file__).with_name("given.yaml").read_text(encoding="utf-8")
)


def gpu_of(profile: str) -> Gpu:
    """The catalogue's GPU of a profile; for a variant, of the profile that it is like."""
    entry = GIVEN[profile]
    return find_gpu(entry["gpus"][0]) if entry["gpus"] else gpu_of(entry["like"])


def given_figures(profile: str) -> dict[str, Figure]:
    return dict(flatten(profile, {k: v for k, v in GIVEN[profile].items() if k not in HEADINGS}))


def header(profile: str) -> dict[str, Any]:
    """Description, GPUs, what it is like, and the ratio of link bandwidths where they follow the datasheets."""
    entry = GIVEN[profile]
    head = {key: entry[key] for key in HEADER if key in entry}
    if entry.get("links") == "datasheet":
        mine, base = gpu_of(profile), gpu_of(entry["like"])
        head["scaled_by"] = {
            "gpu_link": float(f"{fabric_bytes_per_s(mine) / fabric_bytes_per_s(base):.3g}"),
            "host_link": float(f"{mine.host_link_bytes_per_s / base.host_link_bytes_per_s:.3g}"),
        }
    return head
