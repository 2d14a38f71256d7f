"""How much slower compute runs beside communication, and beside copies.

    torchrun --nproc-per-node 2 -m calibration.measure.contention --device cuda --minutes 1

Beside communication: a product while all-reduces of another stream (NCCL) or thread (gloo) run without a pause; it
needs a group of ranks. Beside copies: a pass over memory while the host link is busy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from calibration.measure import gemm, ranks, residual
from calibration.measure.case import Reading, Value
from calibration.measure.command import main
from calibration.measure.copies import ends
from calibration.measure.device import Device
from calibration.measure.needs_torch import torch
from calibration.measure.timing import Call, Measured, Policy, measure
from sim.program.kernels import Gemm, HostCopy

FAMILY = "contention"
NCCL_SMS = 24
"""That a collective is taken to hold (sim.cost.overlap)."""
BUSY_BYTES = 256 << 20
CPU_BUSY_BYTES = 16 << 20
PRODUCT = Gemm(8192, 8192, 8192, "bf16")
CPU_PRODUCT = Gemm(512, 512, 512, "fp32")
PASS_BYTES = 1 << 30
CALLS_BESIDE = 400
POLICY = Policy(case_s=0.5, warm_up_s=0.1, least_rounds=5, most_rounds=50)


def readings(device: Device) -> Iterator[Reading]:
    if ranks.size() > 1:
        yield Reading(FAMILY, "overlap.slowdown", beside_collectives)
    if device.name == "cuda":
        yield Reading(FAMILY, "overlap.copy_share", beside_copies)


def taken(device: Device) -> float:
    """Multiprocessors that a collective holds by the form: NCCL's, or half of a CPU's threads."""
    return NCCL_SMS if device.name == "cuda" else device.info().sms / 2


def beside_collectives(device: Device) -> Value:
    """k of the form 1 + k * taken / (SMs - taken), from a product's time with and without."""
    work = CPU_PRODUCT if device.name == "cpu" else PRODUCT
    call = gemm.case(work).build(device)
    size = (CPU_BUSY_BYTES if device.name == "cpu" else BUSY_BYTES) // 4
    buffer = torch.ones(size, device=device.torch_device)
    ranks.barrier()
    alone = measure(device, call, POLICY, ranks.agreed)
    ranks.barrier()
    together = beside(device, call, lambda: ranks.all_reduce(buffer))
    alone, together = ranks.slowest(alone), ranks.slowest(together)
    held = taken(device)
    ratio = together.median_ns / alone.median_ns
    slowdown = max(ratio - 1, 0.0) * (device.info().sms - held) / held
    return Value(slowdown, together.relative_spread, {"time_ratio": ratio, "taken": held})


def beside_copies(device: Device) -> Value:
    """Share of memory bandwidth that a large pass over memory loses beside copies from the host."""
    recipe = next(recipe for recipe in residual.RECIPES if recipe.name == "aten::add")
    call = recipe.case(PASS_BYTES, "bf16").build(device)
    source, target = ends(device, HostCopy("host_to_device", BUSY_BYTES))
    alone = measure(device, call, POLICY)
    together = beside(device, call, lambda: target.copy_(source, non_blocking=True))
    ratio = together.median_ns / alone.median_ns
    return Value(max(1 - 1 / ratio, 0.0), together.relative_spread, {"time_ratio": ratio})


def beside(device: Device, call: Call, busy: Callable[[], Any]) -> Measured:
    """A call's time while `busy` runs over and over: issued ahead on a stream of its own, or by a thread on a CPU.

    All ranks issue the same number of busy calls, since collectives must meet.
    """
    if device.name == "cuda":
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(CALLS_BESIDE):
                busy()
        found = Measured.of(device.time_ns(call, POLICY.least_rounds))
        device.synchronize()
        return found
    over = threading.Event()
    calls = CALLS_BESIDE // 10

    def run() -> None:
        for _ in range(calls):
            busy()
        over.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    times: list[float] = []
    while not over.is_set() or len(times) < POLICY.least_rounds:
        times += device.time_ns(call, 1)
    thread.join()
    return Measured.of(times)


if __name__ == "__main__":
    main(FAMILY)
