"""The machine of a published row: the catalogue's card by the words of its label, nodes, network."""

from __future__ import annotations

import re
from math import gcd
from typing import Any

from sim.checks.facts import Facts
from sim.hardware.catalogue import Gpu

GPUS: tuple[tuple[str, str, str | None], ...] = (
    (r"gh200", "gh200-96gb", None),
    (r"h800", "h800-sxm-80gb", None),
    (r"a800", "a800-sxm-80gb", None),
    (r"h20\b", "h20-sxm-96gb", None),
    (r"gb300", "gb300-288gb", None),
    (r"b300", "b300-sxm-288gb", None),
    (r"gb200", "gb200-186gb", None),
    (r"b200", "b200-sxm-180gb", None),
    (r"h200", "h200-sxm-141gb", None),
    (r"h100.*(96 ?gb|95(\.\d+)? ?gib)", "h100-96gb-hbm2e", None),
    (r"h100.*nvl", "h100-nvl-94gb", None),
    (r"h100.*pcie", "h100-pcie-80gb", None),
    (r"h100", "h100-sxm-80gb", None),
    (r"a100.*pcie.*40", "a100-pcie-40gb", None),
    (r"a100.*pcie", "a100-pcie-80gb", None),
    (r"a100.*40", "a100-sxm-40gb", None),
    (r"a100", "a100-sxm-80gb", None),
    (r"v100.*pcie", "v100-pcie-32gb", None),
    (r"v100.*16 ?gb", "v100-sxm-32gb", "15.75 GiB"),
    (r"v100", "v100-sxm-32gb", None),
    (r"l40s", "l40s-48gb", None),
    (r"a10g", "a10g-24gb", None),
    (r"rtx ?-?5090", "rtx5090-32gb", None),
    (r"rtx ?-?4090", "rtx4090-24gb", None),
    (r"4070 ?ti ?super", "rtx4070tis-16gb", None),
    (r"5060 ?ti 16", "rtx5060ti-16gb", None),
    (r"rtx pro 6000", "rtxpro6000-96gb", None),
    (r"a6000", "a6000-48gb", None),
    (r"rtx ?-?3090", "rtx3090-24gb", None),
    (r"mi300x", "mi300x-192gb", None),
    (r"mi250x", "mi250x-gcd-64gb", None),
)
"""Words of a GPU's label, the catalogue's name, and usable memory where it is another size.
The first that matches counts; A100 alone is the SXM card of 80 GB."""

UNPRINTED_GPU = "not printed|not stated|unknown"
"""Words of a label that is somebody's guess."""


def gpu_of(facts: Facts) -> tuple[str, str | None]:
    """The catalogue's name of the row's GPU ("" where it has none), and its usable memory if another size is meant."""
    label = facts.text.get("gpu", "").lower().replace("_", " ")
    if re.search(UNPRINTED_GPU, label):
        return "", None
    for words, name, usable in GPUS:
        if re.search(words, label):
            return name, usable
    return "", None


FABRICS = {"gb200-186gb": 72, "gb300-288gb": 72}
"""GPUs that one NVLink fabric joins, where it joins several nodes (NVL72): what a group inside it sees as one node."""

SITES = ((r"a100.*jean.zay", 400),)
"""Networks of machines that a GPU's label names, in Gb/s of a node: Jean Zay's A100 nodes have four Omni-Path ports of
100 Gb/s (model card of BLOOM)."""


def cluster(facts: Facts, gpu: Gpu) -> dict[str, Any]:
    """Nodes of the usual size for this GPU, or as the notes print them ("2 nodes x 4 GPUs"); the network as the label
    prints it ("8x 400 Gb NIC"), or that of the machine it names."""
    gpus = facts.num_gpus or 1
    printed = re.search(r"(\d+) nodes? x (\d+) GPUs", facts.text.get("notes", ""))
    per_node = gcd(gpus, gpu.node.gpus)
    if printed and int(printed[1]) * int(printed[2]) == gpus:
        per_node = int(printed[2])
    elif gpu.name in FABRICS:
        per_node = max(size for size in range(1, FABRICS[gpu.name] + 1) if gpus % size == 0)
    section: dict[str, Any] = {"gpu": gpu.name, "gpus_per_node": per_node, "nodes": gpus // per_node}
    usable = gpu_of(facts)[1]
    network = re.search(r"(\d+)x ?(\d+) ?Gb\b[^,;]* NIC", facts.text.get("gpu", ""))
    if network:
        section["network"] = f"{int(network[1]) * int(network[2]) / per_node:g} Gb/s"
    for words, node_gb_per_s in SITES:
        if facts.says("gpu", words):
            section["network"] = f"{node_gb_per_s / per_node:g} Gb/s"
    return section | ({"usable_memory": usable} if usable else {})
