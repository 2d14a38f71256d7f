"""Copies between device and host: by size, pinned and pageable, each way, both at once, all GPUs at once.

    python -m calibration.measure.copies --device cuda --minutes 1

On a CPU both ends are in the same memory: a plain copy stands for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

from calibration.measure.case import Case, Reading, Value
from calibration.measure.command import main
from calibration.measure.device import Device
from calibration.measure.needs_torch import torch
from calibration.measure.timing import Call
from sim.program.kernels import CopyDirection, HostCopy

FAMILY = "copies"
SIZES = tuple(1 << power for power in range(14, 30, 2))
CPU_SIZES = tuple(1 << power for power in range(14, 27, 2))
PAGEABLE_SIZES = (1 << 22, 1 << 26)
LARGE_BYTES = 256 << 20
ROUNDS = 7
DIRECTIONS: tuple[CopyDirection, ...] = ("host_to_device", "device_to_host")


def case(work: HostCopy) -> Case:
    def build(device: Device) -> Call:
        source, target = ends(device, work)
        return lambda: target.copy_(source, non_blocking=work.pinned)

    return Case(FAMILY, work, build, "memcpy", bytes_needed=work.bytes)


def ends(device: Device, work: HostCopy, index: int | None = None) -> tuple[Any, Any]:
    """Source and target; `index`: of another GPU than the device's own."""
    on_device = device.torch_device if index is None else torch.device("cuda", index)
    there = torch.ones(work.bytes, dtype=torch.uint8, device=on_device)
    here = torch.ones(work.bytes, dtype=torch.uint8, pin_memory=work.pinned and device.name == "cuda")
    return (here, there) if work.direction == "host_to_device" else (there, here)


def cases(device: Device) -> Iterator[Case]:
    """Small copies show the fixed time, large ones the bandwidth."""
    if device.name == "cpu":
        for size in CPU_SIZES:
            yield from (case(HostCopy(direction, size)) for direction in DIRECTIONS)
        return
    for size in reversed(SIZES):
        yield from (case(HostCopy(direction, size)) for direction in DIRECTIONS)
    for size in PAGEABLE_SIZES:
        yield from (case(HostCopy(direction, size, pinned=False)) for direction in DIRECTIONS)


def readings(device: Device) -> Iterator[Reading]:
    """Of copies that share a link or the host's memory."""
    if device.name == "cuda":
        yield Reading(FAMILY, "host_link.both_directions", both_directions)
        yield Reading(FAMILY, "host_link.half_gb_per_s", all_gpus)


def both_directions(device: Device) -> Value:
    """Bytes/s of both ways at once over those of the faster way alone."""
    one_way = [bytes_per_s(device, [(0, direction)]) for direction in DIRECTIONS]
    together = bytes_per_s(device, [(0, direction) for direction in DIRECTIONS])
    gb = {f"{direction}_gb_per_s": rate / 1e9 for direction, rate in zip(DIRECTIONS, one_way)}
    return Value(together / max(one_way), details={**gb, "together_gb_per_s": together / 1e9})


def all_gpus(device: Device) -> Value | None:
    """GB/s of one half of the host's memory: half of what all GPUs copy, both ways at once. None with a single GPU."""
    count = torch.cuda.device_count()
    if count < 2:
        return None
    rate = bytes_per_s(device, [(index, direction) for index in range(count) for direction in DIRECTIONS])
    return Value(rate / 2 / 1e9, details={"gpus": count, "all_gb_per_s": rate / 1e9})


def bytes_per_s(device: Device, ways: list[tuple[int, CopyDirection]]) -> float:
    """Of large pinned copies that all begin together, each on a stream of its own; median of rounds."""
    copies: list[Callable[[], Any]] = []
    for index, direction in ways:
        source, target = ends(device, HostCopy(direction, LARGE_BYTES), index)
        copies.append(partial(copy_on, torch.cuda.Stream(index), source, target))
    rates = []
    for _ in range(ROUNDS + 1):
        wait_for_all()
        begin = time.perf_counter()
        for copy in copies:
            copy()
        wait_for_all()
        rates.append(len(ways) * LARGE_BYTES / (time.perf_counter() - begin))
    return median(rates[1:])


def copy_on(stream: Any, source: Any, target: Any) -> None:
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)


def wait_for_all() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


if __name__ == "__main__":
    main(FAMILY)
