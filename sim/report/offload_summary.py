"""What a strategy moves between a GPU and its host, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from sim.api import Outcome, cost_model


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSummary:
    """What moves between a GPU and its host in the steady step, and the host memory that it takes; times are null where
    the run did not get so far. `copy_over_compute`: by layer, time of what leaves over that of the layer's forward.
    `link_bytes_per_s`: what the links carry, by direction, as those achieved rates are to be read."""

    device_to_host_bytes: int | None
    host_to_device_bytes: int | None
    device_to_host_bytes_per_s: float | None
    host_to_device_bytes_per_s: float | None
    exposed_copies_s: float | None
    waits_for_leaving_s: float | None
    waits_for_fetched_s: float | None
    copy_over_compute: dict[str, float] | None
    host_bytes: int
    node_host_bytes: int
    host_memory_bytes: int
    fits_host: bool
    cpu_step_s: float | None
    waits_for_drives_s: float | None
    nvme_written_bytes: int | None
    nvme_read_bytes: int | None
    nvme_written_bytes_per_s: float | None
    nvme_read_bytes_per_s: float | None
    node_nvme_bytes: int
    nvme_capacity_bytes: int
    fits_nvme: bool
    link_bytes_per_s: dict[str, float]


def summarize_offload(outcome: Outcome) -> OffloadSummary | None:
    """The figures of a strategy; None where nothing moves and nothing is held."""
    copies = outcome.copies
    if not outcome.host_peak_bytes and copies is None:
        return None
    return OffloadSummary(
        device_to_host_bytes=copies.out_bytes if copies else None,
        host_to_device_bytes=copies.back_bytes if copies else None,
        device_to_host_bytes_per_s=copies.out_bytes_per_s if copies else None,
        host_to_device_bytes_per_s=copies.back_bytes_per_s if copies else None,
        exposed_copies_s=copies.exposed_ns * 1e-9 if copies else None,
        waits_for_leaving_s=copies.out_wait_ns * 1e-9 if copies else None,
        waits_for_fetched_s=copies.back_wait_ns * 1e-9 if copies else None,
        copy_over_compute={layer.path: layer.over_compute for layer in copies.layers} if copies else None,
        host_bytes=outcome.host_peak_bytes,
        node_host_bytes=outcome.node_host_bytes,
        host_memory_bytes=outcome.setup.cluster.host_memory_bytes,
        fits_host=outcome.fits_host,
        cpu_step_s=copies.cpu_step_ns * 1e-9 if copies else None,
        waits_for_drives_s=copies.drive_wait_ns * 1e-9 if copies else None,
        nvme_written_bytes=copies.written_bytes if copies else None,
        nvme_read_bytes=copies.read_bytes if copies else None,
        nvme_written_bytes_per_s=copies.written_bytes_per_s if copies else None,
        nvme_read_bytes_per_s=copies.read_bytes_per_s if copies else None,
        node_nvme_bytes=outcome.node_nvme_bytes,
        nvme_capacity_bytes=outcome.setup.cluster.drives.capacity_bytes,
        fits_nvme=outcome.fits_nvme,
        link_bytes_per_s=_links(outcome),
    )


def _links(outcome: Outcome) -> dict[str, float]:
    """One GPU's own link each way, and its share of the node's memory (both ways together) and drives."""
    mesh = outcome.setup.mesh
    links, (read, write) = (
        cost_model(outcome.setup).host_links(mesh.gpus_per_node),
        outcome.setup.cluster.drives.share(mesh),
    )
    return {
        "device_to_host": links.device_to_host_bytes_per_s,
        "host_to_device": links.host_to_device_bytes_per_s,
        "host_memory": links.shared_bytes_per_s,
        "nvme_read": read,
        "nvme_write": write,
    }
