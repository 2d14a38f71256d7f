"""FSDP1 (FullyShardedDataParallel): one Unit per flat parameter, its hooks around forward and backward.

Unlike FSDP2, bytes that another stream uses are freed by record_stream, and the host waits for the second-last free
before it gathers again (limit_all_gathers). Gradients are taken where autograd has summed up the flat parameter's.
Source: torch 2.14, distributed/fsdp/_runtime_utils.py and _exec_order_utils.py; recorded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from sim.model.module import Module, Parameter
from sim.program.program import ALL_REDUCE, COMPUTE, REDUCE_SCATTER
from sim.runtime.autograd import Gradients
from sim.runtime.ops.pointwise import to
from sim.runtime.sharding.flat_parameter import PRE_UNSHARD, UNSHARD, FlatParameter
from sim.runtime.sharding.fsdp1_reduction import reduce_gradient
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor

MOST_IN_FLIGHT = 2
"""Gathers that may be in flight before the host waits (_FreeEventQueue)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What every unit is told. `ranks` share a flat parameter if it `splits`, else replicate it."""

    ranks: int
    replicas: int
    splits: bool
    reshard_after_forward: bool
    use_orig_params: bool
    limit_all_gathers: bool
    backward_prefetch: Literal["pre", "post"] | None
    forward_prefetch: bool
    original_dtype: str
    gathered_dtype: str
    reduce_dtype: str
    cast_inputs: str | None
    one_nccl_stream: bool
    """Collectives of the shard group run one after the other, from whatever stream they come."""

    @property
    def casts(self) -> bool:
        """Are parameters cast before they are gathered?"""
        return self.gathered_dtype != self.original_dtype


class Training(Enum):
    """What a flat parameter is in."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD_PRE = "before and during its backward"
    BACKWARD_POST = "after its backward"


class Shared:
    """What all units of one root share."""

    def __init__(self, tape: Tape, policy: Policy) -> None:
        self.tape = tape
        self.policy = policy
        self.units: list[Unit] = []
        """The root first."""
        self.reduces = True
        self.free_events: deque[int] = deque()
        self.pre_forward_order: list[Unit] = []
        """Of the first iteration, and so of all."""
        self.post_forward_order: list[Unit] = []
        self.is_first_iteration = True
        self.is_initialized = False


class Unit:
    """A flat parameter and the hooks of its module."""

    def __init__(self, shared: Shared, module: Module, slots: list[Parameter]) -> None:
        self.shared = shared
        self.tape = shared.tape
        self.policy = shared.policy
        self.module = module
        self.parameter = FlatParameter(shared.tape, slots, shared.policy)
        self.is_root = not shared.units
        self.training = Training.IDLE
        self.prefetched = False
        self.needs_forward_unshard = False
        self.needs_backward_unshard = False
        self.ran_pre_backward = False
        self.pre_forward_index: int | None = None
        self.post_forward_index: int | None = None
        shared.units.append(self)
        module.hooks = self

    # -- hooks around forward ----------------------------------------------------------------------------------
    def pre_forward(self, module: Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.is_root:
            self._root_pre_forward()
        if self.training is Training.BACKWARD_PRE:  # a recomputation on gathered parameters
            return arguments
        shared, recorder = self.shared, self.tape.recorder
        self.training = Training.FORWARD
        if shared.is_first_iteration and self.pre_forward_index is None:
            self.pre_forward_index = len(shared.pre_forward_order)
            shared.pre_forward_order.append(self)
        if not self.prefetched:
            self._unshard()
        self.needs_forward_unshard = False
        recorder.stream_waits_stream(COMPUTE, UNSHARD)
        self._prefetch(self._next_in_forward(), Training.FORWARD)
        dtype = self.policy.cast_inputs
        if dtype is None:
            return arguments
        return tuple(
            to(self.tape, a, dtype) if isinstance(a, Tensor) and a.dtype in ("bf16", "fp16", "fp32") else a
            for a in arguments
        )

    def _root_pre_forward(self) -> None:
        shared, recorder = self.shared, self.tape.recorder
        if not shared.is_initialized:
            shared.is_initialized = True
            for unit in shared.units:
                unit.parameter.initialize()
                leaf = unit.parameter.flat
                assert leaf is not None
                leaf.post_hook = unit.post_backward
        for unit in shared.units:
            unit.parameter.forget_gradient()
        if self.policy.forward_prefetch:
            for unit in shared.units:
                unit.needs_forward_unshard, unit.prefetched = True, False
        recorder.stream_waits_stream(UNSHARD, COMPUTE)
        recorder.stream_waits_stream(PRE_UNSHARD, COMPUTE)

    def post_forward(self, module: Module, output: Any) -> Any:
        if self.training is Training.BACKWARD_PRE:
            return output
        order = self.shared.post_forward_order
        if not self.post_forward_index:  # torch asks so: the first unit of all may be entered again
            self.post_forward_index = len(order)
        order.append(self)
        self._reshard(not self.is_root and self.policy.reshard_after_forward, COMPUTE)
        if self.tape.grad_enabled:
            self.needs_backward_unshard = self.ran_pre_backward = False
            for tensor in output if isinstance(output, tuple) else (output,):
                if tensor.node is not None:
                    tensor.node.pre_hooks = [*(tensor.node.pre_hooks or []), self.pre_backward]
                    self.needs_backward_unshard = True
        self.training = Training.IDLE
        return output

    # -- parameters --------------------------------------------------------------------------------------------
    def _unshard(self) -> None:
        parameter, recorder, free_events = self.parameter, self.tape.recorder, self.shared.free_events
        if parameter.pre_unshard():
            recorder.stream_waits_stream(UNSHARD, PRE_UNSHARD)
        if self.policy.limit_all_gathers and len(free_events) >= MOST_IN_FLIGHT:
            recorder.sync(free_events.popleft())
        parameter.unshard()
        if self.training is Training.FORWARD:
            parameter.use_views()

    def _reshard(self, free: bool, stream: int) -> None:
        self.parameter.reshard(free, stream)
        if self.policy.limit_all_gathers and free:
            self.shared.free_events.append(self.tape.recorder.record(stream))
        self.parameter.post_reshard(stream)
        self.prefetched = False

    def _prefetch(self, target: Unit | None, training: Training) -> None:
        if target is None or target.prefetched:
            return
        before, target.training = target.training, training
        target._unshard()
        target.training, target.prefetched = before, True

    def _next_in_forward(self) -> Unit | None:
        order, index = self.shared.pre_forward_order, self.pre_forward_index
        if not self.policy.forward_prefetch or index is None or index + 1 == len(order):
            return None
        return order[index + 1] if order[index + 1].needs_forward_unshard else None

    def _next_in_backward(self, when: Literal["pre", "post"]) -> Unit | None:
        order, index = self.shared.post_forward_order, self.post_forward_index
        if self.policy.backward_prefetch != when or not index:
            return None
        return order[index - 1] if order[index - 1].needs_backward_unshard else None

    # -- hooks around backward ---------------------------------------------------------------------------------
    def pre_backward(self, gradients: Gradients) -> None:
        """Before the node that made the unit's output runs."""
        if self.ran_pre_backward:
            return
        if self.is_root:
            self.tape.final_callbacks.append(self._finish_backward)
        self.training = Training.BACKWARD_PRE
        if self.needs_backward_unshard:
            if not self.prefetched:
                self._unshard()
            self.tape.recorder.stream_waits_stream(COMPUTE, UNSHARD)
        self.needs_backward_unshard = False
        self._prefetch(self._next_in_backward("pre"), Training.BACKWARD_PRE)
        self.ran_pre_backward = True

    def post_backward(self, flat: Tensor) -> None:
        """The flat parameter's gradient is complete, on the unshard stream: reshard, then reduce on a third stream."""
        self.training = Training.BACKWARD_POST
        if flat.grad is None:
            return
        self.tape.recorder.host("fsdp_unit")
        self._reshard(self._frees_in_backward, UNSHARD)
        self._prefetch(self._next_in_backward("post"), Training.BACKWARD_PRE)
        if self.shared.reduces:
            reduce_gradient(self.tape, self.parameter)
        else:
            self.parameter.use_unreduced_gradient()

    @property
    def _frees_in_backward(self) -> bool:
        return self.policy.splits and (self.shared.reduces or self.policy.reshard_after_forward)

    def _finish_backward(self) -> None:
        """_post_backward_final_callback, of the root."""
        shared, recorder = self.shared, self.tape.recorder
        recorder.stream_waits_stream(COMPUTE, UNSHARD)  # the engine joins the streams of leaves
        if shared.reduces:
            recorder.stream_waits_stream(COMPUTE, REDUCE_SCATTER)
            if self.policy.replicas > 1:
                recorder.stream_waits_stream(COMPUTE, ALL_REDUCE)
        shared.is_first_iteration = False
        shared.post_forward_order.clear()
        for unit in shared.units:
            if unit.training is Training.BACKWARD_PRE:  # gathered, but no gradient came
                unit._reshard(unit._frees_in_backward, COMPUTE)
            unit.training, unit.post_forward_index, unit.prefetched = Training.IDLE, None, False
            unit.ran_pre_backward = unit.needs_backward_unshard = False
