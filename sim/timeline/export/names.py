"""What a profiler calls the rows of a program."""

from __future__ import annotations

import numpy as np

from sim.program.kernels import Collective
from sim.program.program import Ints, Program, Row

NCCL_OPERATIONS = {
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter_Sum",
    "all_reduce": "AllReduce_Sum",
    "all_to_all": "SendRecv",
    "broadcast": "Broadcast",
}
NCCL_DTYPES = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "int64": "i64", "int32": "i32", "uint8": "u8"}


def collective_name(collective: Collective) -> str:
    """As PyTorch's profiler shows NCCL's kernels: ncclDevKernel_ReduceScatter_Sum_f32_RING_LL.

    NCCL names its general kernels after the ring algorithm and LL protocol whichever it then runs, and the dtype where
    it reduces.
    """
    operation = NCCL_OPERATIONS[collective.kind]
    if operation == "SendRecv":
        return "ncclDevKernel_SendRecv"
    dtype = f"_{NCCL_DTYPES.get(collective.dtype, collective.dtype)}" if operation.endswith("_Sum") else ""
    return f"ncclDevKernel_{operation}{dtype}_RING_LL"


def row_names(program: Program, rows: Ints) -> tuple[list[str], Ints]:
    """A list of names, and for each of `rows` (launches and collectives) the number of its name."""
    kernels = [kernel.name for kernel in program.kernels]
    collectives = [collective_name(collective) for collective in program.collectives]
    names = list(dict.fromkeys([*kernels, *collectives]))
    number = {name: index for index, name in enumerate(names)}
    of_kernel = np.array([number[name] for name in kernels], np.int64)
    of_collective = np.array([number[name] for name in collectives], np.int64)
    argument, is_launch = program.row_argument[rows], program.row_kind[rows] == Row.LAUNCH
    result = np.zeros(len(rows), np.int64)
    result[is_launch] = of_kernel[argument[is_launch]]
    result[~is_launch] = of_collective[argument[~is_launch]]
    return names, result


def category(name: str) -> str:
    """Kineto's category of what runs on a stream."""
    return "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
