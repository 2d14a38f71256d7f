"""A compiled block at run time: one node of the graph, whose forward and backward are plans made once per kind of block.

Source: wrappers that Inductor of torch 2.14 generates for torchtitan's block over a fake device; order and reuse of buffers
inside a block are modelled after them, saved tensors equal theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sim.model.calls import interpret
from sim.model.module import Module, Parameter
from sim.program.program import PHASE_SHIFT, Owner, Phase
from sim.runtime.autograd import Gradients, Node, SavedTensor
from sim.runtime.checkpoint import CheckpointWrapper
from sim.runtime.compiled import elementwise, libraries, loss, sequence
from sim.runtime.compiled.buffers import Step
from sim.runtime.compiled.fuse import schedule
from sim.runtime.compiled.graph import Kind, Value
from sim.runtime.compiled.micro_pipeline import Pipelines, Run, pipelines
from sim.runtime.compiled.partition import saved_values
from sim.runtime.compiled.trace import NotCompilable, Tracer
from sim.runtime.ops.base import Op, first
from sim.runtime.recorder import Operators
from sim.runtime.selective import Selective
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor

assert elementwise and libraries and loss and sequence  # importing them fills the tracer's rules

Places = dict[Value, Tensor]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a block of one kind does. `saved`: forward values, inputs among them, that backward gets; `gradients`: one per
    input, None where none is needed."""

    inputs: list[Value]
    output: Value
    forward: list[Step]
    saved: list[Value]
    tangent: Value | None
    gradients: list[Value | None]
    backward: list[Step]
    pieces: tuple[Pipelines, Pipelines]
    """What goes piece by piece in forward and in backward."""


def make_plan(
    function: Callable[..., Any], tensors: list[Tensor], slots: list[Parameter], autocast_dtype: str | None,
    differentiates: bool, checkpointed: bool = False, selective: Selective | None = None, float8: str | None = None,
    asynchronous: bool = False,
) -> Plan:  # fmt: skip
    """Trace, cut and fuse. `tensors`: the function's arguments, then the parameters that it uses.

    `checkpointed`: all of it is one region, which keeps what `selective` says.
    """
    tracer = Tracer(autocast_dtype, checkpointed, selective, float8, asynchronous)
    inputs = []
    for number, tensor in enumerate(tensors):
        value = tracer.input(tensor.shape, tensor.dtype, tensor.strides)
        value.requires_grad = tensor.requires_grad
        value.parameter = number >= len(tensors) - len(slots)
        inputs.append(value)
    arguments = inputs[: len(inputs) - len(slots)]
    real = [slot.tensor for slot in slots]
    for slot, value in zip(slots, inputs[len(arguments) :]):
        slot.tensor = value
    try:
        with interpret(tracer):
            output = function(*arguments)
    finally:
        for slot, own in zip(slots, real):
            slot.tensor = own
    if not isinstance(output, Value):
        raise NotCompilable("a function that gives more than one tensor")
    lent = set(inputs)
    if not differentiates:
        steps = schedule([output], lent, lent)
        return Plan(inputs, output, steps, [], None, [], [], _pieces(asynchronous, (steps, [output]), ([], [])))
    tangent = tracer.input(output.shape, output.dtype, output.strides)
    tangent.forward = False
    found = tracer.differentiate(output, tangent)
    gradients = [found.get(value) if value.requires_grad else None for value in inputs]
    wanted = [gradient for gradient in gradients if gradient is not None]
    saved = saved_values(tracer.values, output, wanted, tangent)
    forward = schedule([output, *(v for v in saved if v.kind is not Kind.INPUT)], lent, lent)
    borrowed = {*lent, tangent, output.storage}
    backward = schedule(wanted, {*saved, tangent}, borrowed)
    pieces = _pieces(asynchronous, (forward, [output, *saved]), (backward, wanted))
    return Plan(inputs, output, forward, saved, tangent, gradients, backward, pieces)


def _pieces(asynchronous: bool, *passes: tuple[list[Step], list[Value]]) -> tuple[Pipelines, Pipelines]:
    """Of forward and backward, each with what outlives it."""
    forward, backward = (pipelines(*given) if asynchronous else Pipelines() for given in passes)
    return forward, backward


class CompiledFunction(Op):
    """AOTAutograd's function: saves what the partitioner chose."""

    node = "CompiledFunctionBackward"
    saves_late = True

    @staticmethod
    def backward(tape: Tape, node: Node, gradients: Gradients, saved: list[Any]) -> Gradients:
        (plan,) = node.attributes
        places: Places = dict(zip(plan.saved, saved))
        saved.clear()
        node.release()
        places[plan.tangent] = first(gradients)
        tape.recorder.host("compiled_graph")
        _run(tape, plan.backward, places, plan.pieces[1], forward=False)
        return [None if g is None else _tensor(places, g) for g in plan.gradients]


class CompiledBlock(Module):
    """block.compile(): its forward is a compiled function of its arguments and parameters."""

    def __init__(self, tape: Tape, module: Module, plans: dict[Any, Plan], float8: str | None) -> None:
        self.tape = tape
        self.module = module
        self.float8 = float8
        self.plans = plans
        """Shared by blocks that are alike."""
        self.path = module.path

    def forward(self, *arguments: Any) -> Tensor:
        tape = self.tape
        slots = self.module.parameters()
        tensors = [Tensor.of(a) for a in (*arguments, *(slot.tensor for slot in slots))]
        checkpointed = isinstance(self.module, CheckpointWrapper) and tape.recomputes
        differentiates = tape.records(tuple(tensors))
        key = (
            tuple((t.shape, t.dtype, t.strides, t.requires_grad) for t in tensors),
            tape.autocast_dtype, differentiates, checkpointed,
        )  # fmt: skip
        plan = self.plans.get(key)
        if plan is None:
            function, selective = self.module.forward, None
            if isinstance(self.module, CheckpointWrapper):
                function = self.module.module.forward
                selective = self.module.policy() if checkpointed and self.module.policy is not None else None
            plan = self.plans[key] = make_plan(
                function, tensors, slots, tape.autocast_dtype, differentiates, checkpointed, selective, self.float8,
                tape.asynchronous,
            )  # fmt: skip
        return _call(tape, plan, tensors, checkpointed)


class CompiledLoss:
    """torch.compile(loss): a function of logits and targets."""

    def __init__(self, tape: Tape, loss: Callable[..., Any]) -> None:
        self.tape = tape
        self.loss = loss
        self._plans: dict[Any, Plan] = {}

    def __call__(self, *arguments: Any) -> Tensor:
        tape, tensors = self.tape, [Tensor.of(a) for a in arguments]
        key = tuple((t.shape, t.dtype, t.strides) for t in tensors), tape.autocast_dtype, tape.records(tuple(tensors))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = make_plan(self.loss, tensors, [], tape.autocast_dtype, key[2])
        return _call(tape, plan, tensors, checkpointed=False)


def _call(tape: Tape, plan: Plan, tensors: list[Tensor], checkpointed: bool) -> Tensor:
    tape.recorder.host("compiled_graph")
    node = Node(tape, CompiledFunction, tuple(tensors), (plan,)) if plan.tangent is not None else None
    given: Places = dict(zip(plan.inputs, tensors))
    places = dict(given)
    _run(tape, plan.forward, places, plan.pieces[0], forward=True)
    output = _tensor(places, plan.output)
    if node is not None:
        node.metas = [(shape, output.dtype if dtype == "fp8" else dtype) for shape, dtype in node.metas]
        if checkpointed:
            for value, tensor in zip(plan.inputs, tensors):
                if tensor.requires_grad and not value.parameter:
                    tensor.storage.belongs_to(Owner.CHECKPOINT)
        node.saved = [SavedTensor(tape, (given if value in given else places)[value]) for value in plan.saved]
        output.node, output.requires_grad = node, True
    return output


def _tensor(places: Places, value: Value) -> Tensor:
    """The value's tensor: its own, or a view of its storage's."""
    tensor = places.get(value)
    if tensor is None:
        tensor = places[value.storage].alias(value.shape, value.strides, value.dtype)
    return tensor


def _run(tape: Tape, steps: list[Step], places: Places, pieces: Pipelines, forward: bool) -> None:
    """Allocate, launch, free: step by step. In backward, what only computes forward values again is recomputation."""
    recorder = tape.recorder
    base, owner = recorder.base, recorder.default_owner
    run = Run(tape, pieces)
    for step in steps:
        again = not forward and step.forward
        if again:
            recorder.base = base & ((1 << PHASE_SHIFT) - 1) | Phase.RECOMPUTE << PHASE_SHIFT
            recorder.default_owner = int(Owner.RECOMPUTED)
        recorder.operator(_operator(step))
        if step.extern is not None:
            _run_extern(tape, step, step.extern, places, run)
        else:
            for value in step.written:
                places[value] = _buffer(tape, step, value, places)
            recorder.memory_bound(_kernel_name(step), _family(step), step.moved_bytes)
        for value in step.dead:
            del places[value]
        recorder.base, recorder.default_owner = base, owner


def _run_extern(tape: Tape, step: Step, extern: Value, places: Places, run: Run) -> None:
    assert extern.extern is not None
    planned = extern.extern.planned
    out = _buffer(tape, step, step.written[0], places) if planned else None
    inputs = [_tensor(places, value) for value in extern.inputs]
    if (made := run.step(step, inputs, out)) is not None:
        places[step.written[0]] = made
        return
    results = extern.extern.run(tape, inputs, out)
    if planned:
        places[step.written[0]] = results[0]
    else:
        for value in step.written:
            places[value] = results[value.part]


def _buffer(tape: Tape, step: Step, value: Value, places: Places) -> Tensor:
    """A new buffer, or a dead one's bytes."""
    if value in step.taken:
        old = places.pop(step.taken[value])
        return Tensor(old.storage, value.shape, value.dtype, value.strides)
    return tape.empty(value.shape, value.dtype, value.strides)


def _family(step: Step) -> str:
    """Which measured kernels the generated one is likened to."""
    if step.column:
        return "reduce"
    if any(value.aten in ("aten.amax", "aten._log_softmax_backward_data") for value in step.members):
        return "cross_entropy"
    if any(value.kind is Kind.REDUCTION for value in step.members):
        return "norm_forward" if step.forward else "norm_backward"
    return "elementwise"


def _kernel_name(step: Step) -> str:
    kind = "red" if any(value.kind is Kind.REDUCTION for value in step.members) else "poi"
    return "_".join(
        ["triton", kind, "fused", *dict.fromkeys(value.aten.removeprefix("aten.") for value in step.members)]
    )


def _operator(step: Step) -> int:
    extern = step.extern
    return Operators.number(extern.aten if extern is not None else _kernel_name(step))
