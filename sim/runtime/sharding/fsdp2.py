"""FSDP2's fully_shard: one Unit per parameter group, its hooks around forward and backward.

FSDP.md and TAPE_LLAMA_FSDP.md section 4 are the rules; names follow torch.distributed.fsdp. Bytes move only in the
transitions of `ParameterGroup` and in `Reduction`; a Unit decides when.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from sim.model.module import Module, Parameter
from sim.program.program import COMPUTE
from sim.runtime.autograd import Gradients, Node
from sim.runtime.ops.base import Op
from sim.runtime.ops.pointwise import to
from sim.runtime.sharding.communication import Communication, gathers_wait_for_compute
from sim.runtime.sharding.parameters import ParameterGroup, Shards
from sim.runtime.sharding.policy import UnitPolicy
from sim.runtime.sharding.reduction import Reduction
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


class Training(Enum):
    """What a module, or a parameter group, is doing. The two differ while a region is recomputed."""

    IDLE = "idle"
    FORWARD = "forward"
    PRE_BACKWARD = "pre-backward"
    POST_BACKWARD = "post-backward"


class _RegisterPostBackward(Op):
    """An identity over a unit's inputs whose backward is the unit's post_backward."""

    node = "RegisterPostBackwardFunctionBackward"

    @staticmethod
    def forward(tape: Tape, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(x.alias(x.shape, x.strides) for x in arguments if isinstance(x, Tensor))

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        node.attributes[0].post_backward()
        return list(gradients)


class Unit:
    """A parameter group and the hooks of its modules."""

    def __init__(
        self, tape: Tape, communication: Communication, name: str, modules: list[Module], slots: list[Parameter],
        policy: UnitPolicy,
    ) -> None:  # fmt: skip
        self.tape = tape
        self.communication = communication
        self.name = name
        self.modules = modules
        self.policy = policy
        self.group = ParameterGroup(tape, communication, policy, slots)
        self.reduction = Reduction(self.group)
        self.training = Training.IDLE
        self.module_training = Training.IDLE
        self.positions: list[int] = []  # in post_forward_order
        self.reduces = True
        self.stays_gathered = False
        """With `reduces` false: keep the parameters for the next micro-batch (set_reshard_after_backward(False))."""
        self.forward_prefetch: list[Unit] = []
        self.backward_prefetch: list[Unit] | None = None
        self._to_run: set[Module] = set()
        communication.units.append(self)
        for module in modules:
            module.hooks = self

    # -- hooks around forward ----------------------------------------------------------------------------------
    def pre_forward(self, module: Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.module_training is Training.PRE_BACKWARD:  # a recomputation inside this unit's backward
            if self.group.parameters and self.group.shards is not Shards.UNSHARDED:
                self.unshard()
            return self._cast(arguments)
        begins = self.module_training is not Training.FORWARD
        self.module_training = Training.FORWARD
        if begins:
            if len(self.modules) > 1:
                self._to_run = set(self.modules)
            if self.communication.root_of_this_forward is None:
                self.communication.root_of_this_forward = self
                if not self.tape.engine_running:
                    gathers_wait_for_compute(self.tape.recorder)
        arguments = self._cast(arguments)
        if self.group.parameters:
            enters = self.training is not Training.FORWARD
            self.training = Training.FORWARD
            self.unshard()
            if enters and self.tape.grad_enabled:
                arguments = self._register_post_backward(arguments)
        if begins:
            for target in self.forward_prefetch:
                target.prefetch(Training.FORWARD)
        return arguments

    def post_forward(self, module: Module, output: Any) -> Any:
        if self.module_training is Training.PRE_BACKWARD:
            return output
        if len(self.modules) > 1:
            self._to_run.discard(module)
            if self._to_run:
                return output
        communication = self.communication
        if self.group.parameters:
            if not self.tape.engine_running:
                self._reshard_after_forward()
                communication.post_forward_order.append(self)
                self.positions.append(len(communication.post_forward_order) - 1)
            self.training = Training.IDLE
        for tensor in output if isinstance(output, tuple) else (output,):
            if self.tape.grad_enabled and tensor.node is not None:
                tensor.node.pre_hooks = [*(tensor.node.pre_hooks or []), self.pre_backward]
        self.module_training = Training.IDLE
        if communication.root_of_this_forward is self:
            communication.deferred_gather = None
            communication.root_of_this_forward = None
        return output

    def _cast(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        dtype = self.policy.cast_inputs
        if dtype is None:
            return arguments
        return tuple(
            to(self.tape, a, dtype) if isinstance(a, Tensor) and a.dtype in ("bf16", "fp16", "fp32") else a
            for a in arguments
        )

    def _register_post_backward(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        tracked = tuple(a for a in arguments if a.requires_grad)
        if not tracked:
            return arguments
        passed = iter(self.tape.apply_tuple(_RegisterPostBackward, tracked, self))
        return tuple(next(passed) if a.requires_grad else a for a in arguments)

    # -- parameters --------------------------------------------------------------------------------------------
    def unshard(self) -> None:
        """Gather, if that is still to do, and wait for it."""
        self._gather()
        self.group.land(forward=self.training is Training.FORWARD)

    def _gather(self) -> None:
        self.group.gather(overlapped=self.training in (Training.FORWARD, Training.PRE_BACKWARD))

    def _reshard_after_forward(self) -> None:
        reshard = self.policy.reshard_after_forward
        if reshard is True:
            self.group.drop()
        elif reshard is not False:
            self.group.shrink(int(reshard))

    def prefetch(self, training: Training) -> None:
        """Issue this unit's all-gather ahead of its time."""
        before, self.training = self.training, training
        self._gather()
        self.training = before

    # -- hooks around backward ---------------------------------------------------------------------------------
    def pre_backward(self, gradients: Gradients) -> None:
        """Before the node that made the unit's output runs, with the output's gradient."""
        communication = self.communication
        self.module_training = Training.PRE_BACKWARD
        if not communication.final_callback_queued:
            communication.final_callback_queued = True
            self.tape.final_callbacks.append(lambda: finish_backward(communication))
        if not self.group.parameters or self.training is Training.PRE_BACKWARD:
            return
        self.training = Training.PRE_BACKWARD
        self.unshard()
        if self.backward_prefetch:  # an empty list counts as none (_fsdp_state.py, _pre_backward)
            for target in self.backward_prefetch:
                target.prefetch(Training.PRE_BACKWARD)
        elif self.positions:
            position = self.positions.pop()
            if position > 0:
                communication.post_forward_order[position - 1].prefetch(Training.PRE_BACKWARD)

    def post_backward(self) -> None:
        """After the gradient of the unit's inputs: reshard, then reduce."""
        self.training = Training.POST_BACKWARD
        recorder = self.tape.recorder
        recorder.host("fsdp_unit")
        self.reduction.add_to_accumulated()
        if not self.reduces:
            if not self.stays_gathered:
                self.group.drop()
            self.reduction.keep_unreduced()
            return
        owners, gradients = self.reduction.collect()
        if self.policy.reshard_after_backward:
            self.group.drop()
        kept = self.communication.reduce_inputs
        while len(kept) >= self.policy.reduce_scatter_buffers:
            recorder.wait(COMPUTE, kept[0][1])
            kept.pop(0)
        if gradients:
            kept.append(self.reduction.reduce(owners, gradients))


def finish_backward(communication: Communication) -> None:
    """The final callback: units that got no post-backward, then everything kept until now dies."""
    for unit in communication.units:
        if unit.group.parameters:
            if unit.training is not Training.POST_BACKWARD:
                unit.post_backward()
            unit.training = Training.IDLE
        if unit.reduction.offloaded is not None:  # the host waits until the gradients have arrived
            unit.tape.recorder.sync(unit.reduction.offloaded)
            unit.reduction.offloaded = None
        unit.module_training = Training.IDLE
        if communication.is_last_backward:
            unit.group.forget_pending()
            unit.reduction.all_reduce_input = None
            unit.positions.clear()
    if communication.is_last_backward:
        communication.post_forward_order.clear()
        if communication.last_reduction is not None and communication.units:
            communication.units[0].tape.recorder.wait(COMPUTE, communication.last_reduction)
            communication.last_reduction = None
        communication.reduce_inputs.clear()
    communication.final_callback_queued = False
    communication.root_of_this_forward = None
