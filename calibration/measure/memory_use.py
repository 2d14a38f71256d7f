"""Device memory outside PyTorch's allocator: the CUDA context and communicators; and cuBLAS's workspace inside it.

    python -m calibration.measure.memory_use --device cuda --minutes 1

The context is read in a process of its own, before anything is allocated; what other processes hold is taken off where
the driver shows it before the context exists.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from calibration.measure import ranks
from calibration.measure.case import Reading, Value
from calibration.measure.command import main
from calibration.measure.device import Device
from calibration.measure.needs_torch import torch

FAMILY = "memory_use"
SIDE = 256
IN_A_PROCESS = """
import sys, torch
torch.cuda.set_device(int(sys.argv[1]))
torch.ones(1, device="cuda") * 2
free, total = torch.cuda.mem_get_info()
print(total - free - torch.cuda.memory_reserved())
"""


def readings(device: Device) -> Iterator[Reading]:
    if device.name == "cuda":
        yield Reading(FAMILY, "device.context_bytes", context)
        yield Reading(FAMILY, "device.workspace_bytes", workspace)
        if ranks.size() > 1:
            yield Reading(FAMILY, "device.communicator_bytes", communicator)


def outside_bytes(device: Device) -> int:
    """Used on the device by whatever is not PyTorch's allocator of this process."""
    index = device.torch_device.index
    free, total = torch.cuda.mem_get_info(index)
    return int(total - free - torch.cuda.memory_reserved(index))


def context(device: Device) -> Value:
    """One more process with a context: what the device's use grows by."""
    index = device.torch_device.index
    before = outside_bytes(device)
    command = [sys.executable, "-c", IN_A_PROCESS, str(index)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"a process with a context of its own failed: {done.stderr.strip().splitlines()[-1]}")
    there = int(done.stdout.split()[-1]) - torch.cuda.memory_reserved(index)
    return Value(max(there - before, 0), details={"beside_bytes": before})


def workspace(device: Device) -> Value:
    """What the first product leaves allocated: cuBLAS's workspace on this stream."""
    torch._C._cuda_clearCublasWorkspaces()
    a = torch.ones(SIDE, SIDE, device=device.torch_device)
    before = torch.cuda.memory_allocated()
    out = a @ a
    device.synchronize()
    after = torch.cuda.memory_allocated() - out.numel() * out.element_size()
    return Value(after - before)


def communicator(device: Device) -> Value:
    """What a new group's first collective takes."""
    before = outside_bytes(device)
    ranks.first_collective_of_a_new_group(device.torch_device)
    device.synchronize()
    return Value(max(outside_bytes(device) - before, 0), details={"ranks": ranks.size()})


if __name__ == "__main__":
    main(FAMILY)
