"""Offload on the console: what moves to the host and back, and whether the step waits for it."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text

from sim.program.program import OWNER_LABELS, Owner
from sim.report.offload_summary import OffloadSummary
from sim.report.summary import StrategySummary
from sim.report.tables import Cell, Column
from sim.report.words import NOTHING, duration_of
from sim.units import format_bytes

HIDDEN_SHARE = 0.01
"""Copies hide if less than this share of the step has a copy and no kernel."""


def offload_columns(bad: str) -> list[Column]:
    """Columns without a figure where nothing is offloaded; `bad`: the style of a host memory that is too small."""

    def shown(figure: Callable[[OffloadSummary], float | None], text: Callable[[float], str]) -> Callable[..., Cell]:
        def cell(s: StrategySummary) -> str:
            value = figure(s.offload) if s.offload else None
            return NOTHING if value is None else text(value)

        return cell

    def amount(value: float) -> str:
        return format_bytes(int(value))

    def rate(figure: Callable[[OffloadSummary], float | None], link: str) -> Callable[..., Cell]:
        """Achieved GB/s of what the link carries (and of no more than all copies of the GPU share)."""

        def cell(s: StrategySummary) -> str:
            value = figure(s.offload) if s.offload else None
            if s.offload is None or not value:
                return NOTHING
            links = s.offload.link_bytes_per_s
            return f"{value / 1e9:.1f} of {min(links[link], links['host_memory']) / 1e9:.0f}"

        return cell

    def host_memory(s: StrategySummary) -> Cell:
        """What all GPUs of a node hold in its main memory, of how much."""
        if s.offload is None:
            return NOTHING
        used, there = format_bytes(s.offload.node_host_bytes), format_bytes(s.offload.host_memory_bytes)
        return Text(f"{used} of {there}", style="" if s.offload.fits_host else bad)

    def drives(s: StrategySummary) -> Cell:
        """What all GPUs of a node hold on its drives, of how much."""
        if s.offload is None or not s.offload.node_nvme_bytes:
            return NOTHING
        used, there = format_bytes(s.offload.node_nvme_bytes), format_bytes(s.offload.nvme_capacity_bytes)
        return Text(f"{used} of {there}", style="" if s.offload.fits_nvme else bad)

    return [
        Column("to host", shown(lambda o: o.device_to_host_bytes, amount)),
        Column("GB/s", rate(lambda o: o.device_to_host_bytes_per_s, "device_to_host")),
        Column("back", shown(lambda o: o.host_to_device_bytes, amount)),
        Column("GB/s", rate(lambda o: o.host_to_device_bytes_per_s, "host_to_device")),
        Column("exposed", shown(lambda o: o.exposed_copies_s, duration_of)),
        Column("waits out", shown(lambda o: o.waits_for_leaving_s or None, duration_of)),
        Column("waits back", shown(lambda o: o.waits_for_fetched_s or None, duration_of)),
        Column("host/node", host_memory),
        Column("to drives", shown(lambda o: o.nvme_written_bytes or None, amount)),
        Column("GB/s", rate(lambda o: o.nvme_written_bytes_per_s, "nvme_write")),
        Column("from drives", shown(lambda o: o.nvme_read_bytes or None, amount)),
        Column("GB/s", rate(lambda o: o.nvme_read_bytes_per_s, "nvme_read")),
        Column("drives/node", drives),
    ]


def offload_explanation(s: StrategySummary, bad: str) -> Text:
    """Whether the copies hide, whether they act on the peak, and whether the host has room."""
    text, offload = Text(), s.offload
    if offload is None:
        return text
    text.append(_hidden_or_waits(offload, s.step_time_s))
    for waited, what in (
        (offload.cpu_step_s, "the CPU works on optimizer states"),
        (offload.waits_for_drives_s, "the host waits for drives"),
    ):
        if waited:
            text.append(f" For {duration_of(waited)} {what}.")
    if offload.copy_over_compute:
        text.append(_of_layers(offload.copy_over_compute))
    if s.peak.owners.get(OWNER_LABELS[Owner.RECOMPUTED], 0):
        text.append(" This peak sits in a recomputation: offloading what its layer keeps does not lower it.")
    if not offload.fits_host:
        needed, there = format_bytes(offload.node_host_bytes), format_bytes(offload.host_memory_bytes)
        text.append(f" Host memory: {needed} per node is needed, {there} are there.", style=bad)
    if not offload.fits_nvme:
        needed, there = format_bytes(offload.node_nvme_bytes), format_bytes(offload.nvme_capacity_bytes)
        text.append(f" Drives: {needed} per node are needed, {there} are there.", style=bad)
    return text


def _of_layers(ratios: dict[str, float]) -> str:
    """How long what a layer saves takes to leave, beside its own forward."""
    least, most = min(ratios.values()), max(ratios.values())
    range_of = f"{least:.2f}" if f"{least:.2f}" == f"{most:.2f}" else f"{least:.2f} to {most:.2f}"
    layers = f"{len(ratios)} layers" if len(ratios) > 1 else next(iter(ratios))
    return f" What {layers} save{'s' * (len(ratios) == 1)} takes {range_of} times the forward of a layer to leave."


def _hidden_or_waits(offload: OffloadSummary, step_s: float | None) -> str:
    if offload.exposed_copies_s is None or step_s is None:
        return ""
    if offload.exposed_copies_s < HIDDEN_SHARE * step_s:
        return " Copies hide behind compute."
    waits = [
        f"{duration_of(waited)} {why}"
        for waited, why in (
            (offload.waits_for_leaving_s, "until tensors have left"),
            (offload.waits_for_fetched_s, "until tensors are back"),
        )
        if waited
    ]
    said = f": {', '.join(waits)}" if waits else ""
    return f" For {duration_of(offload.exposed_copies_s)} copies run and nothing computes{said}."


def host_footnote(s: StrategySummary) -> str:
    """How far to trust the host's memory, and what exposed means."""
    label, drives = s.labels["host_memory_bytes"], s.labels["drives"]
    on_drives = (
        f" Drives of a node: {drives.label}: {drives.source}." if s.offload and s.offload.node_nvme_bytes else ""
    )
    return (
        f"Host memory of a node: {label.label}: {label.source}.{on_drives} Exposed: a copy runs and no kernel computes."
    )
