"""What a kernel does, in the terms that decide its time.

A `Kernel` is what a profiler would show: a name and a piece of `Work`. Two launches of the same kernel on the same
shapes are one `Kernel` object in a program's table, so a cost model prices each distinct kernel once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

Dtype = Literal["fp32", "bf16", "fp16", "fp8", "fp4", "int64", "int32", "bool", "uint8", "complex64"]
ITEM_BYTES: dict[str, int] = {
    "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int64": 8, "int32": 4, "bool": 1, "uint8": 1, "complex64": 8,
}  # fmt: skip


def packed_bytes(elements: int, dtype: str) -> int:
    """Bytes of so many numbers: of 4 bit ("fp4", Transformer Engine's alone) two to a byte."""
    return elements // 2 if dtype == "fp4" else elements * ITEM_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class Gemm:
    """C[m, n] (+)= A[m, k] B[k, n], `batch` times (bmm); `accumulate` adds into C (reads it too).

    `grouped`: the members are experts, whose tokens lie one after the other: their number is no row's length.
    `over_rows`: the sum runs over tokens (a weight's gradient): m and n are lengths of rows, else n and k are.
    """

    m: int
    n: int
    k: int
    dtype: str = "bf16"
    batch: int = 1
    accumulate: bool = False
    grouped: bool = False
    over_rows: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        touched = self.m * self.k + self.k * self.n + self.m * self.n * (2 if self.accumulate else 1)
        return packed_bytes(self.batch * touched, self.dtype)


@dataclass(frozen=True, slots=True)
class Attention:
    """A fused attention kernel over q [batch, heads, q_len, head_dim] and k, v [batch, kv_heads, kv_len, head_dim].

    `generation` names the kernel family: "flash2", "flash3", "efficient". FLOPs count the causal half where `causal`,
    as Dao et al. count them: 4 B H Sq Sk D forward (half if causal), 2.5 times that backward. `value_head_dim`: where
    values are not as wide as queries and keys; 0: they are.
    """

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    causal: bool
    backward: bool
    generation: str = "flash2"
    dtype: str = "bf16"
    value_head_dim: int = 0
    past: int = 0
    """Keys before the first query's own, which every query sees; where `causal`."""
    window: int = 0
    """Keys that a query sees at most, itself among them; where `causal`. 0: all."""

    @property
    def mean_head_dim(self) -> int:
        """Over the products: one with keys and one with values forward, three and two backward."""
        keys, values = (3, 2) if self.backward else (1, 1)
        return (keys * self.head_dim + values * (self.value_head_dim or self.head_dim)) // (keys + values)

    @property
    def flops(self) -> int:
        seen = self.q_len * (self.past + self.kv_len if self.causal else 2 * self.kv_len)
        if 0 < self.window < self.kv_len:
            seen = 2 * self.q_len * self.window - max(0, self.window - self.past) ** 2
        forward = 2 * self.batch * self.heads * seen * self.mean_head_dim
        return forward * 5 // 2 if self.backward else forward

    @property
    def bytes(self) -> int:
        item, tokens = ITEM_BYTES[self.dtype], self.batch * self.mean_head_dim
        once = item * tokens * (2 * self.heads * self.q_len + 2 * self.kv_heads * self.kv_len)
        return once * 2 if self.backward else once


@dataclass(frozen=True, slots=True)
class Memory:
    """A memory-bound kernel: time is bytes moved (reads + writes) over a bandwidth that depends on `family`.

    Families: "elementwise", "norm_forward", "norm_backward" (and those of persistent kernels,
    "persistent_norm_forward", "persistent_norm_backward"), "softmax", "reduce", "embedding", "copy", "optimizer",
    "fill", "sort", "dropout", "cross_entropy". `flops` is informative only (never decides the time).
    """

    family: str
    bytes: int
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in memory: `strides` in elements, None where it is in plain order."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None

    @property
    def bytes(self) -> int:
        """Of its elements."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator as a CPU runs it, on tensors that lie so: no form prices it, it is timed as it is.

    `node`: the autograd node in whose backward it runs, "" forward. `reads`: what it (or that node) is given; `out`: what
    it makes, None where its name and inputs tell. `bytes` and `flops` are informative.
    """

    name: str
    node: str
    reads: tuple[Layout, ...]
    out: Layout | None = None
    bytes: int = 0
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Fixed:
    """A kernel whose duration is given (the `chain` toy, or a measured one)."""

    duration_ns: int
    flops: int = 0
    bytes: int = 0


Work = Gemm | Attention | Memory | Operator | Fixed


@dataclass(frozen=True, slots=True)
class Kernel:
    """One distinct kernel: `name` as a profiler shows it (e.g. "aten::mm"), and its work."""

    name: str
    work: Work


CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "ring_exchange"]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of one communicator. `bytes` is the FULL buffer S: gathered output (all-gather), input
    (reduce-scatter), buffer (all-reduce); of a ring exchange what each rank sends to its neighbour. `group` names a mesh
    dimension, e.g. "fsdp"; its `size` counts ranks."""

    kind: CollectiveKind
    bytes: int
    group: str
    size: int
    dtype: str = "bf16"


CPU_MEMORY = "cpu_memory_mib"
"""Host work by the MiB of main memory that the CPU reads and writes."""
CopyDirection = Literal["device_to_host", "host_to_device", "nvme_to_host", "host_to_nvme"]


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy between the GPU and its host's memory, or between that and the node's drives. `pinned`: the host side is
    page-locked, so that it needs no staging."""

    direction: CopyDirection
    bytes: int
    pinned: bool = True


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one pipeline stage hands to another: hidden states of a micro-batch, or (`backward`) their gradient.

    `sender` and `receiver` are simulated ranks; `stage` is the one that made it.
    """

    bytes: int
    sender: int
    receiver: int
    stage: int
    micro_batch: int
    backward: bool = False

    def __str__(self) -> str:
        what = "gradient" if self.backward else "hidden states"
        return f"{what} of micro-batch {self.micro_batch} from stage {self.stage}"


@dataclass(frozen=True, slots=True)
class HostWork:
    """Host time that is no launch: entering a checkpoint region, Python of a selective policy, an optimizer's loop."""

    name: str
    count: int = 1
