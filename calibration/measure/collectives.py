"""Collectives by kind, size and number of ranks, under torchrun: NCCL between GPUs, gloo between CPUs.

    torchrun --nproc-per-node 8 -m calibration.measure.collectives --device cuda --minutes 3

Groups are the first 2, 4, 8, ... ranks and all of them; each rank times its own calls, the slowest counts. One process
alone measures nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_args

from calibration.measure import ranks
from calibration.measure.case import DESIGN, SCENARIO, Case
from calibration.measure.command import main
from calibration.measure.device import Device
from calibration.measure.needs_torch import torch
from calibration.measure.operands import DTYPES
from calibration.measure.timing import Call
from sim.program.kernels import Collective, CollectiveKind

FAMILY = "collectives"
KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
SIZES = tuple(1 << power for power in range(12, 30, 2))
CPU_SIZES = tuple(1 << power for power in range(12, 23, 2))
ITEM_BYTES = {"cuda": 2, "cpu": 4}
dist = torch.distributed


def case(work: Collective, nodes: int = 1, origin: str = DESIGN) -> Case:
    """One collective over the first `work.size` ranks; `nodes` they lie on."""

    def build(device: Device) -> Call:
        return call_of(device, work)

    variant = f"{nodes} nodes" if nodes > 1 else ""
    return Case(FAMILY, work, build, f"c10d::{work.kind}", variant, origin, 2 * work.bytes)


def of_scenario(works: Iterable[Collective]) -> Iterator[Case]:
    """A scenario's own collectives, where this run has as many ranks and torch's group can split the buffer."""
    for work in works:
        fits = work.size in group_sizes(ranks.size()) and work.dtype in DTYPES
        if fits and work.bytes and work.bytes % (work.size * DTYPES[work.dtype].itemsize) == 0:
            yield case(work, -(-work.size // ranks.ranks_per_node()), SCENARIO)


def cases(device: Device) -> Iterator[Case]:
    """Large and small sizes in turn, every kind, every group."""
    for group in group_sizes(ranks.size()):
        nodes = -(-group // ranks.ranks_per_node())
        for size in CPU_SIZES if device.name == "cpu" else SIZES:
            for kind in KINDS:
                if kind == "ring_exchange" and group > 2:
                    continue
                unit = group * ITEM_BYTES[device.name]
                dtype = "fp32" if device.name == "cpu" else "bf16"
                yield case(Collective(kind, size // unit * unit, "", group, dtype), nodes)


def group_sizes(world: int) -> list[int]:
    """2, 4, 8, ... and all ranks."""
    powers = [1 << power for power in range(1, world.bit_length()) if 1 << power < world]
    return [*powers, world] if world > 1 else []


def call_of(device: Device, work: Collective) -> Call:
    """The call on this rank; nothing to do for ranks outside the group."""
    group = group_of(work.size)
    if ranks.rank() >= work.size:
        return lambda: None
    dtype = DTYPES[work.dtype]
    elements = work.bytes // dtype.itemsize
    whole = torch.ones(elements, device=device.torch_device, dtype=dtype)
    part = torch.ones(elements // work.size, device=device.torch_device, dtype=dtype)
    other = torch.empty_like(whole)
    peer = 1 - ranks.rank()

    def exchange() -> None:
        ways = [dist.P2POp(dist.isend, whole, peer), dist.P2POp(dist.irecv, other, peer)]
        for request in dist.batch_isend_irecv(ways):
            request.wait()

    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "ring_exchange": exchange,
    }
    return calls[work.kind]


_groups: dict[int, Any] = {}


def group_of(size: int) -> Any:
    """The group of the first `size` ranks; all ranks must ask for it together."""
    if size not in _groups:
        _groups[size] = dist.group.WORLD if size == ranks.size() else dist.new_group(list(range(size)))
    return _groups[size]


if __name__ == "__main__":
    main(FAMILY)
