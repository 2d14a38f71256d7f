"""How ranks share a step, as a set-up has it: families of sharding, pipeline stages, Megatron's data parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp:
    """FSDP2 fully_shard per block and root.

    `reshard_after_forward` speaks of the blocks: "torchtitan" (all but the last block), True, False, or a number of
    ranks to reshard to. `root_reshard_after_forward`: None is PyTorch's default (the root stays gathered).
    `units`: "blocks" (blocks + root) or "torchtitan_2026" (embedding | blocks | norm + head | root).
    `degree`: ranks that share the parameters, context-parallel ones among them.
    `wrap`: "fsdp(checkpoint)" or "checkpoint(fsdp)"; FSDP2 gathers equally often either way.
    `gradient_sync`: "every" micro-batch reduces, or only the "last" (unsharded gradients are kept meanwhile).
    """

    degree: int
    replicas: int = 1
    reshard_after_forward: Literal["torchtitan"] | bool | int = "torchtitan"
    root_reshard_after_forward: bool | int | None = None
    units: Literal["blocks", "torchtitan_2026"] = "blocks"
    wrap: Literal["fsdp(checkpoint)", "checkpoint(fsdp)"] = "fsdp(checkpoint)"
    forward_prefetch: int = 0
    backward_prefetch: int | None = None
    """None: FSDP2's implicit prefetch of one unit; a number: an explicit prefetch list of that length (an
    empty one counts as none)."""
    reduce_scatter_buffers: int = 1
    gradient_sync: Literal["every", "last"] = "every"
    cast_forward_inputs: bool = True
    cpu_offload: bool = False
    float8_all_gather: bool = False
    """Matrices of the blocks are cast to 8 bit before they are gathered; their scales are made after the optimizer."""


FOLDED = ("zb-v", "dualpipe-v")
SPLITS_BACKWARD = ("zb-h1", "zb-h2", *FOLDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Pipeline stages over `degree` ranks, `chunks` of them on each; `placement`: layers of every stage.

    `schedule` is one of sim.runtime.schedules. The micro-batches are those of `Batch.accumulation`.
    """

    degree: int
    schedule: str
    chunks: int
    placement: tuple[int, ...]
    overlap_p2p: bool = True
    """Compute goes on beside what is sent; else it waits for it (Megatron's 1F1B)."""
    p2p_sync: bool = True
    """Where compute waits for transfers the host does too."""
    scatter_gather: bool = False
    """Tensor-parallel ranks send a part each of what all of them have, and gather it on arrival."""

    @property
    def folded(self) -> bool:
        """Stages go over the ranks there and back: first and last stage are on one rank."""
        return self.schedule in FOLDED

    @property
    def splits_backward(self) -> bool:
        """Weight gradients are put off."""
        return self.schedule in SPLITS_BACKWARD


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """Megatron's data parallelism and mixed precision: gradients summed in the reduce dtype, Adam on fp32 parameters.

    `degree`: ranks that reduce gradients together, context-parallel ones among them.
    `distributed_optimizer`: fp32 parameters and moments split over the `degree` replicas, gradients reduce-scattered,
    parameters gathered after the step. `overlap`: reduce beside backward. `gradient_accumulation_fusion`: products for
    weights' gradients add to the main gradients themselves. `keep_gradients`: those stay until the next backward, and are
    added by way of fp32 copies after each. `moments`: Adam's dtype of both.
    """

    degree: int = 1
    distributed_optimizer: bool = False
    overlap: bool = False
    gradient_accumulation_fusion: bool = True
    optimizer_instances: int = 1
    """Groups of neighbouring replicas, each of which splits main parameters and moments among its ranks."""
    keep_gradients: bool = False
    moments: Literal["fp32", "bf16"] = "fp32"
    fp8_parameters: bool = False
    """Weights that products read in 8 bit are stored so (ModelConfig.fp8)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ddp:
    """DistributedDataParallel. `bucket_cap` None: 25 MiB, the first bucket 1 MiB. `gradient_sync`: gradients are summed
    after "every" micro-batch, or only the "last" (no_sync)."""

    degree: int
    bucket_cap: int | None = None
    gradient_as_bucket_view: bool = False
    gradient_sync: Literal["every", "last"] = "every"
    broadcast_buffers: bool = True
    static_graph: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp1:
    """FullyShardedDataParallel over every block and the root. `degree` ranks share each flat parameter (for "no_shard":
    replicate it), `replicas` > 1 makes the hybrid strategies. `wrap` as in Fsdp; `backward_prefetch` None: none."""

    degree: int
    replicas: int = 1
    strategy: Literal["full_shard", "shard_grad_op", "no_shard"] = "full_shard"
    use_orig_params: bool = False
    limit_all_gathers: bool = True
    backward_prefetch: Literal["pre", "post"] | None = "pre"
    forward_prefetch: bool = False
    wrap: Literal["fsdp(checkpoint)", "checkpoint(fsdp)"] = "fsdp(checkpoint)"
    gradient_sync: Literal["every", "last"] = "every"
    cast_forward_inputs: bool = False

    @property
    def shards(self) -> bool:
        """Parameters are split over the ranks."""
        return self.strategy != "no_shard" and self.degree > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """DeepSpeed's ZeRO. Sizes in elements. `overlap_comm` None: DeepSpeed's default, true for stage 3 only.

    Of stage 3: `prefetch_bucket` elements are gathered ahead, at most `max_live` are gathered, parameters needed again
    within `max_reuse_distance` stay, those below `persistence_threshold` always do.
    """

    degree: int
    stage: Literal[1, 2, 3]
    reduce_bucket: int = 500_000_000
    overlap_comm: bool | None = None
    prefetch_bucket: int = 50_000_000
    persistence_threshold: int = 100_000
    max_live: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group: int = 1_000_000_000
    """Of stage 3: elements of a rank's part that are stepped at a time."""
    offload_optimizer: Literal["cpu", "nvme"] | None = None
    """Where the fp32 part, its gradients and moments lie, which the CPU then steps. "nvme", of stage 3: what is not stepped
    at the moment lies on the node's drives."""
    offload_param: Literal["cpu", "nvme"] | None = None
    """Of stage 3: where the 16-bit parts lie."""
    pipeline_read: bool = False
    """From drives: the next sub-group is read while the present one is stepped."""
    pipeline_write: bool = False
    """To drives: a sub-group is written while the next one is stepped."""
