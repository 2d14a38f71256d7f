"""The Program: what one rank's host thread issues, in order, as columns.

Two column sets share one order. **Rows** go to streams and take time (launch, record, wait, sync, collective, host
work). **Memory events** (alloc, free, record_stream) take none and carry the number of rows issued before them.
`where` packs phase, module path and operator of a row or event into one integer (`Where`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from sim.program.kernels import Collective, HostCopy, HostWork, Kernel, Transfer
from sim.program.periods import Stretch

Ints = npt.NDArray[np.int64]


def narrow(values: Ints, dtype: type[np.signedinteger[Any]]) -> Ints:
    """Whole numbers that are known to be small, in less memory; they are used like any others."""
    return cast(Ints, values.astype(dtype))


class Row(IntEnum):
    """Kinds of rows. `argument` is: kernel number, event number (RECORD, WAIT, SYNC), collective number, host-work number,
    transfer number (SEND, RECEIVE), copy number."""

    LAUNCH = 0
    RECORD = 1
    WAIT = 2
    SYNC = 3
    COLLECTIVE = 4
    HOST = 5
    SEND = 6
    RECEIVE = 7
    COPY = 8


class Mem(IntEnum):
    """Kinds of memory events. `handle` is the number of the allocation, counted from 0 in issue order."""

    ALLOC = 0
    FREE = 1
    RECORD_STREAM = 2


class Owner(IntEnum):
    """Who a byte belongs to."""

    PARAMETER = 0
    GRADIENT = 1
    OPTIMIZER = 2
    ACTIVATION = 3
    CHECKPOINT = 4
    RECOMPUTED = 5
    ACTIVATION_GRADIENT = 6
    GATHERED = 7
    REDUCE_SCATTER = 8
    LOSS = 9
    WORKSPACE = 10
    OTHER = 11

    @property
    def label(self) -> str:
        return OWNER_LABELS[self]


OWNER_LABELS = {
    Owner.PARAMETER: "parameters",
    Owner.GRADIENT: "gradients",
    Owner.OPTIMIZER: "optimizer state",
    Owner.ACTIVATION: "activations",
    Owner.CHECKPOINT: "checkpoints",
    Owner.RECOMPUTED: "recomputed activations",
    Owner.ACTIVATION_GRADIENT: "activation gradients",
    Owner.GATHERED: "gathered parameters",
    Owner.REDUCE_SCATTER: "reduce-scatter buffers",
    Owner.LOSS: "logits and loss",
    Owner.WORKSPACE: "workspace",
    Owner.OTHER: "other",
}

# Streams of a rank, in the order of PyTorch FSDP2's own (FSDP.md fact 1); memory belongs to the stream it was made on.
COMPUTE, ALL_GATHER_COPY_IN, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = range(5)
TENSOR, DATA = 5, 6  # NCCL streams of Megatron's tensor-parallel and data-parallel communicators
# Those of a pipeline: to and from the ranks of the next and the previous stages.
SEND_NEXT, SEND_PREVIOUS, RECEIVE_NEXT, RECEIVE_PREVIOUS = range(7, 11)
DEVICE_TO_HOST, HOST_TO_DEVICE = 11, 12  # those of streamed offload
CONTEXT = 13  # NCCL stream of the context-parallel communicator
NVME_READ, NVME_WRITE = 14, 15  # no streams of the GPU: queues of the node's drives
STREAM_NAMES = (
    "compute", "all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce", "tensor_parallel", "data_parallel",
    "send_next", "send_previous", "receive_next", "receive_previous", "device_to_host", "host_to_device",
    "context_parallel", "nvme_read", "nvme_write",
)  # fmt: skip


class Phase(IntEnum):
    INIT = 0
    FORWARD = 1
    LOSS = 2
    BACKWARD = 3
    RECOMPUTE = 4
    CLIP = 5
    OPTIMIZER = 6
    ZERO_GRAD = 7
    DATA = 8


# `where` = phase << 44 | path << 20 | operator
PATH_SHIFT, PHASE_SHIFT = 20, 44
OPERATOR_MASK, PATH_MASK = (1 << PATH_SHIFT) - 1, (1 << (PHASE_SHIFT - PATH_SHIFT)) - 1


@dataclass(frozen=True, slots=True)
class Mark:
    """A named point in issue order: so many rows and memory events were issued before it."""

    name: str
    rows: int
    memory_events: int


@dataclass(slots=True)
class Program:
    """What one rank issues. All columns are arrays of whole numbers, of equal length within their set; kinds, streams and
    owners take 8 bits each, handles, arguments and row counts 32."""

    kernels: list[Kernel]
    collectives: list[Collective]
    host_works: list[HostWork]
    paths: list[str]
    operators: list[str]
    # rows
    row_kind: Ints
    row_stream: Ints
    row_argument: Ints
    row_where: Ints
    # memory events
    mem_kind: Ints
    mem_handle: Ints
    mem_bytes: Ints  # requested bytes for ALLOC, 0 otherwise
    mem_stream: Ints
    mem_row: Ints  # rows issued before this event
    mem_where: Ints
    owners: Ints  # per handle: Owner
    marks: list[Mark]
    events: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    copies: list[HostCopy] = field(default_factory=list)
    nvme_bytes: int = 0
    """The most that the rank holds on drives."""
    host_row: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """Rows issued before each change of host memory."""
    host_bytes: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """Bytes of host memory that the rank holds from then on for what its GPU does not."""
    host_used: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """Of these, bytes that anything lies in; the rest waits in the cache of pinned blocks."""

    stretches: tuple[Stretch, ...] = ()
    """Where equal periods follow each other, as far as that is known: at most one per step."""

    def where(self, packed: int) -> tuple[Phase, str, str]:
        """Phase, module path and operator that a packed `where` stands for."""
        return (
            Phase(packed >> PHASE_SHIFT),
            self.paths[(packed >> PATH_SHIFT) & PATH_MASK],
            self.operators[packed & OPERATOR_MASK],
        )
