"""Families of sharding beside FSDP2, as sections of `parallel`: DDP."""

from __future__ import annotations

from typing import Literal

from sim.scenario.kinds import Bytes, Ranks
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
