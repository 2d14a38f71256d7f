"""NVMe drives of a node: what they hold, and how fast they read and write."""

from __future__ import annotations

from dataclasses import dataclass

from sim.hardware.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Drives:
    """All drives of a node together, striped; its GPUs share them. Rates in bytes/s."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    capacity_bytes: int

    def share(self, mesh: Mesh) -> tuple[float, float]:
        """What one rank reads and writes while all ranks of its node do the same."""
        ranks = min(mesh.gpus_per_node, mesh.size)
        return self.read_bytes_per_s / ranks, self.write_bytes_per_s / ranks


READ_BYTES_PER_S, WRITE_BYTES_PER_S, CAPACITY_BYTES = 6_800_000_000, 4_000_000_000, 3_840_000_000_000
"""Of the usual drive."""
USUAL = "one drive of PCIe 4 per GPU, as a DGX H100 has eight; 6.8 and 4.0 GB/s and 3.84 TB, as in data sheets of such drives"


def usual_drives(gpus_per_node: int) -> Drives:
    """A drive for each GPU (assumed, see `USUAL`)."""
    return Drives(
        read_bytes_per_s=READ_BYTES_PER_S * gpus_per_node,
        write_bytes_per_s=WRITE_BYTES_PER_S * gpus_per_node,
        capacity_bytes=CAPACITY_BYTES * gpus_per_node,
    )
