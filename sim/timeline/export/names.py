"""What a profiler calls the rows of a program."""

from __future__ import annotations

import numpy as np

from sim.program.kernels import Collective, HostCopy
from sim.program.program import Ints, Program, Row

NCCL_OPERATIONS = {
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter_Sum",
    "all_reduce": "AllReduce_Sum",
    "all_to_all": "SendRecv",
    "ring_exchange": "SendRecv",
    "broadcast": "Broadcast",
}
SEND_RECEIVE = "ncclDevKernel_SendRecv"
NCCL_DTYPES = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "int64": "i64", "int32": "i32", "uint8": "u8"}


def collective_name(collective: Collective) -> str:
    """As PyTorch's profiler shows NCCL's kernels: ncclDevKernel_ReduceScatter_Sum_f32_RING_LL.

    NCCL names its general kernels after the ring algorithm and LL protocol whichever it then runs, and the dtype where
    it reduces.
    """
    operation = NCCL_OPERATIONS[collective.kind]
    if operation == "SendRecv":
        return SEND_RECEIVE
    dtype = f"_{NCCL_DTYPES.get(collective.dtype, collective.dtype)}" if operation.endswith("_Sum") else ""
    return f"ncclDevKernel_{operation}{dtype}_RING_LL"


def copy_name(copy: HostCopy) -> str:
    """As Kineto writes it: Memcpy DtoH (Device -> Pinned). Of drives it knows nothing."""
    if copy.direction == "nvme_to_host":
        return "NVMe read (Drive -> Pinned)"
    if copy.direction == "host_to_nvme":
        return "NVMe write (Pinned -> Drive)"
    host = "Pinned" if copy.pinned else "Pageable"
    return (
        f"Memcpy DtoH (Device -> {host})" if copy.direction == "device_to_host" else f"Memcpy HtoD ({host} -> Device)"
    )


def row_names(program: Program, rows: Ints) -> tuple[list[str], Ints]:
    """A list of names, and for each of `rows` (launches, collectives, copies, sends and receives) the number of its name."""
    tables = {
        Row.LAUNCH: [kernel.name for kernel in program.kernels],
        Row.COLLECTIVE: [collective_name(collective) for collective in program.collectives],
        Row.COPY: [copy_name(copy) for copy in program.copies],
        Row.SEND: [SEND_RECEIVE] * len(program.transfers),
        Row.RECEIVE: [SEND_RECEIVE] * len(program.transfers),
    }
    names = list(dict.fromkeys(name for table in tables.values() for name in table))
    number = {name: index for index, name in enumerate(names)}
    kind, argument = program.row_kind[rows], program.row_argument[rows]
    result = np.zeros(len(rows), np.int64)
    for of_kind, table in tables.items():
        here = kind == of_kind
        result[here] = np.array([number[name] for name in table], np.int64)[argument[here]]
    return names, result


def category(name: str) -> str:
    """Kineto's category of what runs on a stream."""
    return "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
