"""What the FSDP units of one root share: buffers and order that outlive a unit's own pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.program.kernels import Collective
from sim.program.program import ALL_GATHER, ALL_GATHER_COPY_IN, COMPUTE
from sim.runtime.host_memory import HostMemory
from sim.runtime.recorder import Recorder
from sim.runtime.tensor import Tensor

if TYPE_CHECKING:
    from sim.runtime.sharding.fsdp2 import Unit
    from sim.runtime.tape import Tape


class Communication:
    """Named owners of buffers whose death is a rule of its own (FSDP.md 4 to 7)."""

    def __init__(self, host: HostMemory) -> None:
        self.host = host
        """Pinned memory for parameters and gradients under CPU offload."""
        self.units: list[Unit] = []
        self.deferred_gather: Tensor | None = None
        """An all-gather output that lives until the next unit has been copied out."""
        self.deferred_event: int | None = None
        self.reduce_inputs: list[tuple[Tensor, int]] = []
        """Reduce-scatter inputs kept until their turn, with the event of their reduction."""
        self.post_forward_order: list[Unit] = []
        self.root_of_this_forward: Unit | None = None
        self.final_callback_queued = False
        self.last_reduction: int | None = None
        self.is_last_backward = True

    def scale_matrices(self, tape: Tape) -> None:
        """precompute_float8_dynamic_scale_for_fsdp: the largest magnitude of every matrix that is gathered in 8 bit, over
        all ranks, for the next step's casts."""
        groups = [unit.group for unit in self.units if unit.policy.matrix_dtype is not None]
        shards = [
            p for g in groups for p in g.parameters if g.policy.gathered_dtype_of(p.shape) == g.policy.matrix_dtype
        ]
        if not shards:
            return
        largest = tape.empty((len(shards),), "fp32")
        read = sum(p.sharded.bytes for p in shards if p.sharded is not None)
        tape.recorder.memory_bound("aten::_foreach_norm", "reduce", read + largest.bytes)
        ranks = groups[0].policy.shard_ranks
        tape.recorder.collective(Collective("all_reduce", largest.bytes, "fsdp", ranks, "fp32"), COMPUTE)


def gathers_wait_for(recorder: Recorder, event: int) -> None:
    """Both all-gather streams wait for an event."""
    recorder.wait(ALL_GATHER_COPY_IN, event)
    recorder.wait(ALL_GATHER, event)


def gathers_wait_for_compute(recorder: Recorder) -> None:
    """The root's pre-forward: gathers wait for what compute has been given so far (the optimizer)."""
    gathers_wait_for(recorder, recorder.record(COMPUTE))
