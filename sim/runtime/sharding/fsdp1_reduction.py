"""FSDP1's reduction: a flat gradient is cast, padded, divided, reduced, and becomes the gradient of the shard."""

from __future__ import annotations

from sim.program.kernels import Collective
from sim.program.program import ALL_REDUCE, REDUCE_SCATTER, Owner
from sim.runtime.recorder import Operators
from sim.runtime.sharding.flat_parameter import UNSHARD, FlatParameter
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor

_REDUCE = Operators.number("fsdp::reduce_scatter")


def predivide_factor(ranks: int) -> int:
    """Gradients are divided by about the root of the number of ranks before, and by the rest after the reduction."""
    factor = 1
    while ranks % factor == 0 and ranks / factor > factor:
        factor *= 2
    return factor


def reduce_gradient(tape: Tape, parameter: FlatParameter) -> None:
    """_post_backward_hook's second half, on the post-backward stream; the gradient was computed on the unshard stream."""
    recorder, policy, flat = tape.recorder, parameter.policy, parameter.flat
    assert flat is not None and flat.grad is not None
    recorder.operator(_REDUCE)
    recorder.stream_waits_stream(REDUCE_SCATTER, UNSHARD)
    computed, flat.grad = flat.grad, None
    gradient = _cast(tape, computed, policy.reduce_dtype, REDUCE_SCATTER, Owner.REDUCE_SCATTER)
    if policy.splits:
        _reduce_shards(tape, parameter, gradient)
    else:
        _sum_whole(tape, parameter, gradient)
    del gradient
    computed.storage.used_by(REDUCE_SCATTER)


def _reduce_shards(tape: Tape, parameter: FlatParameter, gradient: Tensor) -> None:
    """_reduce_grad."""
    recorder, policy = tape.recorder, parameter.policy
    padded = (parameter.shard_elements * policy.ranks,)
    if padded != gradient.shape:
        source = gradient
        gradient = tape.empty(padded, source.dtype, stream=REDUCE_SCATTER, owner=Owner.REDUCE_SCATTER)
        recorder.memory_bound("aten::constant_pad_nd", "copy", source.bytes + gradient.bytes, REDUCE_SCATTER)
    out = tape.empty((parameter.shard_elements,), gradient.dtype, stream=REDUCE_SCATTER, owner=Owner.GRADIENT)
    world = policy.ranks * policy.replicas
    before = predivide_factor(world)
    _divide(tape, gradient, before, REDUCE_SCATTER)
    work = Collective("reduce_scatter", gradient.bytes, "fsdp", policy.ranks, gradient.dtype)
    parameter.communicate(work, REDUCE_SCATTER)
    stream = REDUCE_SCATTER
    if policy.replicas > 1:
        stream = ALL_REDUCE
        recorder.stream_waits_stream(ALL_REDUCE, REDUCE_SCATTER)
        out.storage.used_by(ALL_REDUCE)
        recorder.collective(Collective("all_reduce", out.bytes, "replicate", policy.replicas, out.dtype), ALL_REDUCE)
    _divide(tape, out, world / before, stream)
    out = _cast(tape, out, policy.original_dtype, stream, Owner.GRADIENT)
    assert parameter.shard is not None
    if parameter.shard.grad is not None:
        recorder.memory_bound("aten::add_", "elementwise", 3 * out.bytes, stream)
        parameter.use_gradient(parameter.shard.grad)
    else:
        _give(parameter, out)


def _sum_whole(tape: Tape, parameter: FlatParameter, gradient: Tensor) -> None:
    """_reduce_grad_no_shard: what was summed before is part of the gradient that is summed now."""
    policy = parameter.policy
    before = predivide_factor(policy.ranks)
    _divide(tape, gradient, before, REDUCE_SCATTER)
    if policy.ranks > 1:
        work = Collective("all_reduce", gradient.bytes, "fsdp", policy.ranks, gradient.dtype)
        parameter.communicate(work, REDUCE_SCATTER)
    _divide(tape, gradient, policy.ranks / before, REDUCE_SCATTER)
    _give(parameter, _cast(tape, gradient, policy.original_dtype, REDUCE_SCATTER, Owner.GRADIENT))


def _give(parameter: FlatParameter, gradient: Tensor) -> None:
    """The shard's gradient; with use_orig_params what the optimizer steps has views of it."""
    assert parameter.shard is not None
    gradient.storage.belongs_to(Owner.GRADIENT)
    parameter.shard.grad = gradient
    parameter.use_gradient(gradient)


def _cast(tape: Tape, tensor: Tensor, dtype: str, stream: int, owner: Owner) -> Tensor:
    if tensor.dtype == dtype:
        return tensor
    out = tape.empty(tensor.shape, dtype, stream=stream, owner=owner)
    tape.recorder.memory_bound("aten::copy_", "elementwise", tensor.bytes + out.bytes, stream)
    return out


def _divide(tape: Tape, tensor: Tensor, factor: float, stream: int) -> None:
    if factor > 1:
        tape.recorder.memory_bound("aten::div_", "elementwise", 2 * tensor.bytes, stream)
