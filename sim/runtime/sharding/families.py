"""From a set-up to its sharding family."""

from __future__ import annotations

from sim.runtime.host_memory import HostMemory
from sim.runtime.sharding.ddp import DistributedDataParallel
from sim.runtime.sharding.family import Family
from sim.runtime.sharding.fsdp1_family import FullyShardedDataParallel
from sim.runtime.sharding.zero import ZeroPartition
from sim.runtime.sharding.zero3 import ZeroParameters
from sim.runtime.tape import Tape
from sim.scenario.setup import Setup


def make_family(tape: Tape, setup: Setup, memory: HostMemory) -> Family | None:
    """The family that a set-up asks for, if it is neither FSDP2 nor Megatron's; `memory`: pinned, for what is offloaded."""
    if setup.ddp is not None:
        return DistributedDataParallel(tape, setup.ddp)
    if setup.fsdp1 is not None:
        return FullyShardedDataParallel(tape, setup.fsdp1, setup.precision, setup.torch)
    if setup.zero is not None:
        stages = ZeroParameters if setup.zero.stage == 3 else ZeroPartition
        return stages(tape, setup.zero, setup.precision, memory)
    return None
