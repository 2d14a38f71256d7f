"""Megatron's layers under FSDP2: gradients that each tensor-parallel rank has of its own tokens only are summed at the end.

finalize_model_grads (megatron-core 0.16, distributed/finalize_model_grads.py): a shard's gradient is gathered over the
FSDP ranks (full_tensor), all are flattened and summed over the tensor-parallel ranks, and each is sharded again
(distribute_tensor, a scatter, which is priced as a broadcast). torchtitan's are summed in FSDP's own reduction instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.program.kernels import Collective
from sim.program.program import ALL_REDUCE, COMPUTE, Owner
from sim.runtime.recorder import Operators
from sim.runtime.sharding.communication import Communication
from sim.runtime.sharding.parameters import ShardedParameter
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor

_SUM = Operators.number("megatron::all_reduce_partial_gradients")


def sum_partial_gradients(tape: Tape, communications: Sequence[Communication], tensor_ranks: int) -> None:
    """After the last backward. Does nothing where there is one tensor-parallel rank."""
    units = [unit for communication in communications for unit in communication.units]
    partial = [
        (unit.policy.shard_ranks, p)
        for unit in units
        for p in unit.group.parameters
        if p.slot.partial and p.sharded is not None and p.sharded.grad is not None
    ]
    if tensor_ranks == 1 or not partial:
        return
    recorder = tape.recorder
    recorder.operator(_SUM)
    whole = [_gathered(tape, p, ranks) for ranks, p in partial]
    dtype = whole[0].dtype
    flat = tape.empty((sum(tensor.elements for tensor in whole),), dtype)
    recorder.memory_bound("aten::cat", "copy", 2 * flat.bytes)
    recorder.collective(Collective("all_reduce", flat.bytes, "tp", tensor_ranks, dtype), COMPUTE)
    while whole:
        ranks, p = partial.pop(0)
        tensor = whole.pop(0)
        recorder.memory_bound("aten::copy_", "copy", 2 * tensor.bytes)
        if ranks > 1:
            _collective(tape, Collective("broadcast", tensor.bytes, "fsdp", ranks, dtype))
        assert p.sharded is not None
        p.sharded.grad = tape.empty((p.shard_elements,), dtype, owner=Owner.GRADIENT)
        del tensor


def _gathered(tape: Tape, p: ShardedParameter, ranks: int) -> Tensor:
    """DTensor.full_tensor()."""
    assert p.sharded is not None and p.sharded.grad is not None
    dtype = p.sharded.grad.dtype
    whole = tape.empty((ranks * p.shard_elements,), dtype)
    if ranks > 1:
        _collective(tape, Collective("all_gather", whole.bytes, "fsdp", ranks, dtype))
    return whole


def _collective(tape: Tape, work: Collective) -> None:
    """On the communicator's stream, for which compute waits at once."""
    recorder = tape.recorder
    recorder.stream_waits_stream(ALL_REDUCE, COMPUTE)
    recorder.collective(work, ALL_REDUCE)
    recorder.stream_waits_stream(COMPUTE, ALL_REDUCE)
