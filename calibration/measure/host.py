"""What the training thread spends: per operator, event, checkpoint region, operator under a selective policy, parameter of
an optimizer's loop, driver call.

    python -m calibration.measure.host --device cuda --minutes 1

Work is so small that the device is never waited for; on a CPU an operator's own time is part of every measured kernel,
so only Python around regions and policies is read there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from calibration.measure.case import Reading, Value
from calibration.measure.command import main
from calibration.measure.device import Device
from calibration.measure.needs_torch import torch
from calibration.measure.timing import Call

# isort: split
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

FAMILY = "host"
OPERATORS = 64
"""In a row, so that one reading of the clock does not count."""
REGIONS = 8
ROUNDS = 31
PARAMETERS = 100
SEGMENT_BYTES = 20 << 20
REGION_ROWS = 2
"""A region costs host time where it is entered and where it is recomputed (`sim.runtime.checkpoint`)."""


def readings(device: Device) -> Iterator[Reading]:
    yield Reading(FAMILY, "host.work.checkpoint_region_us", checkpoint_region)
    yield Reading(FAMILY, "host.work.selective_policy_us", selective_policy)
    yield Reading(FAMILY, "host.work.optimizer_loop_us", optimizer_loop)
    if device.name == "cuda":
        yield Reading(FAMILY, "host.launch_us", launch)
        yield Reading(FAMILY, "host.event_us", event)
        for call in ("cuda_malloc", "cuda_free", "cuda_host_alloc", "synchronize"):
            yield Reading(FAMILY, f"host.driver.{call}_us", partial(driver_call, call))


def timed_us(device: Device, call: Call, parts: int, before: Call | None = None) -> tuple[float, float]:
    """Median over rounds of the host's time for one of the `parts` of a call, and its spread. `before` each round the
    device is idle."""
    times = []
    for _ in range(ROUNDS):
        if before is not None:
            before()
        device.synchronize()
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3 / parts)
    low, middle, high = np.quantile(times[1:], (0.1, 0.5, 0.9)).tolist()
    return middle, (high - low) / 2 / middle if middle else 0.0


def small(device: Device) -> Any:
    return torch.ones(16, device=device.torch_device, requires_grad=True)


def chain(x: Any, operators: int = OPERATORS) -> Any:
    for _ in range(operators):
        x = x * 1.5
    return x


def launch(device: Device) -> Value:
    """One operator with autograd in eager mode."""
    x = small(device)
    return Value(*timed_us(device, lambda: chain(x), OPERATORS))


def event(device: Device) -> Value:
    """Recording an event, or waiting for one."""
    stream = torch.cuda.current_stream()
    made = [torch.cuda.Event() for _ in range(OPERATORS)]

    def record() -> None:
        for one in made:
            one.record(stream)

    return Value(*timed_us(device, record, OPERATORS))


def step_of(device: Device, wrap: Callable[[Any], Any]) -> tuple[float, float]:
    """Host time in us per region of forward and backward over `REGIONS` regions."""
    x = small(device)

    def step() -> None:
        y = x
        for _ in range(REGIONS):
            y = wrap(y)
        y.sum().backward()

    return timed_us(device, step, REGIONS)


def checkpoint_region(device: Device) -> Value:
    """Entering and recomputing a region of one operator, less running the operator once more."""
    one = partial(chain, operators=1)
    plain, _ = step_of(device, one)
    wrapped, spread = step_of(device, lambda y: checkpoint(one, y, use_reentrant=False))
    with torch.no_grad():
        x = small(device)
        again, _ = timed_us(device, lambda: chain(x), OPERATORS)
    return Value(max(wrapped - plain - again, 0.0) / REGION_ROWS, spread)


def selective_policy(device: Device) -> Value:
    """Per operator that a selective policy sees, over a plain region of as many operators."""

    def policy(*_: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE

    region = partial(chain, operators=OPERATORS)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    plain, _ = step_of(device, lambda y: checkpoint(region, y, use_reentrant=False))
    selective, spread = step_of(device, lambda y: checkpoint(region, y, use_reentrant=False, context_fn=contexts))
    return Value(max(selective - plain, 0.0) / (REGION_ROWS * OPERATORS), spread)


def optimizer_loop(device: Device) -> Value:
    """Per parameter that an optimizer walks over: a fused step of many tiny ones less the kernel of one."""
    parameters = [torch.nn.Parameter(torch.ones(1, device=device.torch_device)) for _ in range(PARAMETERS)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    many, one = (torch.optim.AdamW(group, lr=1e-4, fused=True) for group in (parameters, parameters[:1]))
    all_us, spread = timed_us(device, many.step, 1)
    one_us, _ = timed_us(device, one.step, 1)
    return Value(max(all_us - one_us, 0.0) / (PARAMETERS - 1), spread)


def driver_call(kind: str, device: Device) -> Value:
    """cudaMalloc and cudaFree of one segment, through the caching allocator; page-locked memory; an idle wait."""
    held: list[Any] = []

    def allocate() -> None:
        held.append(torch.empty(SEGMENT_BYTES, dtype=torch.uint8, device=device.torch_device))

    def release() -> None:
        held.clear()
        torch.cuda.empty_cache()

    def host_alloc() -> None:  # all are held, so that none is found in the cache of pinned blocks
        held.append(torch.empty(SEGMENT_BYTES, dtype=torch.uint8, pin_memory=True))

    def fresh() -> None:
        release()
        allocate()

    calls: dict[str, tuple[Call, Call | None]] = {
        "cuda_malloc": (allocate, release),
        "cuda_free": (release, fresh),
        "cuda_host_alloc": (host_alloc, None),
        "synchronize": (device.synchronize, None),
    }
    call, before = calls[kind]
    value = Value(*timed_us(device, call, 1, before))
    release()
    return value


if __name__ == "__main__":
    main(FAMILY)
