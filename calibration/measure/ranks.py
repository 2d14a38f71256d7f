"""The ranks of a run under torchrun: NCCL between GPUs, gloo between CPUs. One process alone is a group of one."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from calibration.measure.needs_torch import torch
from calibration.measure.timing import Measured

dist = torch.distributed


def launched() -> bool:
    """Has torchrun started this process as one of several?"""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join(device_name: str) -> None:
    """Meet the other ranks, where there are any."""
    if launched() and not dist.is_initialized():
        dist.init_process_group("nccl" if device_name == "cuda" else "gloo")


def end(code: int) -> None:
    """End all ranks' processes together; returns where there is one alone.

    Without the interpreter's clean-up: torch 2.13 aborts in it now and then (3 runs of 16 over gloo), as threads of gloo are
    still at work.
    """
    if dist.is_initialized():
        with suppress(RuntimeError):  # another rank has stopped with an error, and says so
            dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def ranks_per_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(size())))


def barrier() -> None:
    if size() > 1:
        dist.barrier()


def all_reduce(buffer: Any, group: Any = None) -> None:
    dist.all_reduce(buffer, group=group)


def slowest(measured: Measured) -> Measured:
    """Of all ranks' times of a call, those of the rank with the largest median."""
    if size() == 1:
        return measured
    every: list[Any] = [None] * size()
    dist.all_gather_object(every, measured)
    return max(every, key=lambda one: one.median_ns)


def agreed(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def first_collective_of_a_new_group(device: torch.device) -> None:
    group = dist.new_group()
    dist.all_reduce(torch.ones(1, device=device), group=group)
