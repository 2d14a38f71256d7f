"""Families of sharding beside FSDP2, as sections of `parallel`: DDP, FSDP1, ZeRO."""

from __future__ import annotations

from typing import Literal

from sim.scenario.kinds import Bytes, Count, CountOrZero, Ranks, Stage
from sim.scenario.section import Section


class DdpSection(Section):
    """DistributedDataParallel: every rank holds everything; gradients are summed in buckets beside backward."""

    degree: Ranks
    """Replicas of the model: the number of GPUs."""
    bucket_cap: Bytes | None = None
    """bucket_cap_mb: a bucket is full as soon as it holds so much, e.g. 25 MiB. Default: null, torch's 25 MiB with a
    first bucket of 1 MiB (a given size holds for the first too)."""
    gradient_as_bucket_view: bool = False
    """Gradients are views of the buckets instead of copies: one copy of the gradients less. Default: false, as torch."""
    gradient_sync: Literal["every", "last"] = "every"
    """With `batch.accumulation` above 1: sum gradients of every micro-batch (default), or only of the last one
    (no_sync)."""
    broadcast_buffers: bool = True
    """Buffers are broadcast before each forward that follows a sum. Default: true, as torch."""
    static_graph: bool = False
    """The graph is the same in every iteration. The first iteration clones the model's outputs and sums nothing before
    backward has ended; buckets are made anew after the second. Default: false."""


class Fsdp1Section(Section):
    """FullyShardedDataParallel, FSDP1: the parameters of a block in one flat parameter, of which each rank keeps a part.

    Gathered parameters and gradients are freed by record_stream: their bytes wait until other streams are through."""

    degree: Ranks
    """Ranks that share one copy of the parameters; degree x replicas is the number of GPUs."""
    replicas: Ranks = 1
    """Copies of the sharded model: above 1 the hybrid strategies. Default: 1."""
    strategy: Literal["full_shard", "shard_grad_op", "no_shard"] = "full_shard"
    """full_shard (default): blocks drop their gathered parameters after forward; shard_grad_op: they keep them until
    after backward; no_shard: nothing is split, gradients are summed block by block."""
    use_orig_params: bool = False
    """The optimizer sees the parameters that lie in the rank's part instead of the flat part. Default: false."""
    limit_all_gathers: bool = True
    """The host waits before it gathers ahead of more than two frees. Default: true, as torch since 2.0."""
    backward_prefetch: Literal["pre", "post"] | None = "pre"
    """Gather the next block in backward before this one's backward (default), after it, or not ahead at all (null)."""
    forward_prefetch: bool = False
    """Gather the next block in forward ahead of this one's computation, from the second step on. Default: false."""
    wrap: Literal["fsdp(checkpoint)", "checkpoint(fsdp)"] = "fsdp(checkpoint)"
    """Which wrapper is outside. Default: fsdp(checkpoint); with reentrant checkpoints outside, each block is gathered a
    third time."""
    gradient_sync: Literal["every", "last"] = "every"
    """With `batch.accumulation` above 1: reduce gradients of every micro-batch (default), or only of the last one
    (no_sync: gradients of whole blocks are kept in the compute dtype meanwhile)."""
    cast_forward_inputs: bool = False
    """Cast the inputs of wrapped blocks to the compute dtype. Default: false, as torch's MixedPrecision."""


class ZeroSection(Section):
    """DeepSpeed's ZeRO: 16-bit parameters, of which each rank steps a part in fp32 with its optimizer states.

    `precision.parameters` is what the model computes in; `precision.reduce` its communication_data_type."""

    degree: Ranks
    """Ranks that share the states: the number of GPUs."""
    stage: Stage
    """1: optimizer states are shared; 2: gradients too; 3: parameters too."""
    reduce_bucket_size: Count = 500_000_000
    """Elements of a buffer in which gradients are collected and summed. Default: 500,000,000 (1 GB in 16 bit)."""
    overlap_comm: bool | None = None
    """Communicate on streams of its own: sum a full bucket beside backward (stages 1 and 2: with two buffers), gather
    parameters ahead (stage 3). Default: null, DeepSpeed's: false for stages 1 and 2, true for stage 3."""
    prefetch_bucket_size: CountOrZero | None = None
    """Stage 3: elements of parameters that are gathered ahead. Default: 50,000,000."""
    persistence_threshold: CountOrZero | None = None
    """Stage 3: parameters of fewer elements are always gathered. Default: 100,000."""
    max_live_parameters: Count | None = None
    """Stage 3: elements that may be gathered before gathering ahead ends. Default: 1,000,000,000."""
    max_reuse_distance: CountOrZero | None = None
    """Stage 3: parameters that are needed again within so many elements stay gathered. Default: 1,000,000,000."""
    sub_group_size: Count | None = None
    """Stage 3: elements of a rank's part that are stepped at a time, with fp32 gradients of their own. Default:
    1,000,000,000."""
    offload_optimizer: Literal["cpu", "nvme"] | None = None
    """ZeRO-Offload: each rank's fp32 part, gradients and moments are in its node's main memory, where the CPU steps them.
    cpu: all of it; nvme (stage 3, ZeRO-Infinity): on the node's drives but for what is stepped. Default: null, on the GPU."""
    offload_param: Literal["cpu", "nvme"] | None = None
    """Stage 3, with `offload_optimizer`: where the 16-bit parts of the parameters lie until they are gathered. Default:
    null, on the GPU."""
    pipeline_read: bool | None = None
    """With offload_optimizer: nvme: read the next sub-group while one is stepped. Default: false."""
    pipeline_write: bool | None = None
    """With offload_optimizer: nvme: write a sub-group while the next one is stepped. Default: false."""
