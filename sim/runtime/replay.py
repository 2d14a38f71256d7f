"""Layers that are alike are recorded once and stamped: the same program, made several times faster.

A layer runs as a graph of its own behind one `LayerNode`: forward on a second handle of its input, backward as a nested
walk that ends at a boundary. What a live layer issues is kept as a template; a layer of equal key (kind of layer and
shapes; for its backward also which gradients are present then) appends the template with its own handles and module
paths. Whatever is not understood raises `ReplayMismatch`, and the caller records again without stamps; tests compare
both ways event by event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sim.model.calls import Shape
from sim.model.module import Module, Parameter
from sim.program.program import Owner
from sim.runtime.autograd import Edge, Gradients, gradient_edge, run_backward
from sim.runtime.recorder import Operators, Recording
from sim.runtime.strides import Strides
from sim.runtime.templates import (
    BACKWARD,
    FORWARD,
    HELD,
    INCOMING,
    Backward,
    Born,
    Present,
    Repeat,
    ReplayMismatch,
    Stamp,
    Template,
)
from sim.runtime.tensor import Storage, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.runtime.tape import Tape
    from sim.scenario.setup import Setup

FIRST_STAMPED, LAST_LIVE = 2, 2  # in a first pass the first two and the last two of a kind run live


def run_layer(tape: Tape, module: Module, arguments: tuple[Any, ...]) -> Tensor:
    """The forward of a module that has a `repeat`, live or stamped."""
    repeat = module.repeat
    inputs = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    gradients = tape.main_gradients
    alone = gradients is not None and (gradients.reduces_now or gradients.data.keep_gradients)  # they know no layers
    plain = (
        alone or not tape.stamps or not tape.grad_enabled or tape.hooks or tape.autocast_dtype or tape.engine_running
    )
    if plain or len(inputs) != 1 or not isinstance(repeat, Repeat):
        output: Tensor = module.forward(*arguments)
        return output
    casts = tape.fp8 is not None and tape.first_micro_batch
    template = tape.templates.setdefault((repeat.kind, tape.recomputes, casts, _signature(arguments)), Template())
    first_pass = not template.knows_backward(tape.micro_batch, _present(repeat.slots))
    in_middle = FIRST_STAMPED <= repeat.index < repeat.count - LAST_LIVE
    lets_go = repeat.index == 0 and template.shares and not repeat.again
    node = LayerNode(tape, module, repeat, template, inputs[0])
    if template.forward is not None and (in_middle or not first_pass) and not lets_go:
        return node.stamp_forward(tape, inputs[0], arguments)
    return node.live_forward(tape, inputs[0], arguments, learn=repeat.again or 0 < repeat.index < repeat.count - 1)


def _present(slots: tuple[Parameter, ...]) -> Present:
    return tuple(isinstance(s.tensor, Tensor) and s.tensor.grad is not None for s in slots)


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.shape, value.dtype, value.strides, value.requires_grad)
    if isinstance(value, tuple):
        return tuple(_signature(v) for v in value)
    return value if value is None or isinstance(value, int | float | str) else id(value)


def _second_handles(value: Any, x: Tensor, boundary: _Boundary) -> Any:
    """The arguments on handles of their own, so that what the layer keeps shows in the count; x ends at the boundary."""
    if isinstance(value, tuple):
        return tuple(_second_handles(v, x, boundary) for v in value)
    if not isinstance(value, Tensor):
        return value
    inner = Tensor(value.storage, value.shape, value.dtype, value.strides, value.base)
    if value is x:
        inner.requires_grad = True
        inner.node = boundary  # type: ignore[assignment]
    return inner


def _tensors(arguments: tuple[Any, ...]) -> list[Tensor]:
    """All tensors among the arguments, those in tuples too."""
    flat = (b for a in arguments for b in (a if isinstance(a, tuple) else (a,)))
    return [a for a in flat if isinstance(a, Tensor)]


class _Boundary:
    """Where a layer's own graph ends: its input. Served last."""

    sequence = -1
    edges: tuple[Edge, ...] = ()
    metas: tuple[tuple[Shape, str], ...] = ()
    pre_hooks: list[Callable[[Gradients], None]] | None = None

    class op:  # noqa: N801 (stands where a node has its operator)
        number = Operators.number("layer input")

    def __init__(self, base: int) -> None:
        self.base = base
        self.gradient: Tensor | None = None

    def backward(self, tape: Tape, gradients: Gradients) -> Gradients:
        self.gradient = gradients.pop()
        return []

    def release(self) -> None:
        pass


class LayerNode:
    """A whole layer on the tape."""

    class op:  # noqa: N801 (stands where a node has its operator)
        number = Operators.number("layer")

    def __init__(self, tape: Tape, module: Module, repeat: Repeat, template: Template, x: Tensor) -> None:
        self.path, self.paths = module.path, repeat.paths
        self.module = module
        self.template = template
        self.micro_batch = tape.micro_batch
        self.slots = repeat.slots
        self.base = tape.recorder.base
        self.sequence = tape.sequence
        tape.sequence += 1
        self.edges: list[Edge | None] = [gradient_edge(x)]
        self.metas = [(x.shape, x.dtype)]
        self.pre_hooks: list[Callable[[Gradients], None]] | None = None
        self.first_handle = 0
        self.held: list[Tensor] = []
        self.held_handles: list[int | None] = []
        self.root: Any = None
        self.boundary: _Boundary | None = None
        self.learns = False

    # -- forward -----------------------------------------------------------------------------------------------
    def live_forward(self, tape: Tape, x: Tensor, arguments: tuple[Any, ...], learn: bool) -> Tensor:
        """Run the layer on a second handle of its input x, and learn the template where it is missing."""
        recorder, template = tape.recorder, self.template
        tensors = _tensors(arguments)
        holders = [t.storage.handles for t in tensors]
        self.boundary = _Boundary(self.base)
        arguments = _second_handles(arguments, x, self.boundary)
        begin, sequence, owner = recorder.position(), tape.sequence, x.storage.owner
        output: Tensor = self.module.forward(*arguments)
        del arguments
        learn = learn and not tape.workspace_is_new(begin.handles)
        self.first_handle, self.root, self.learns = begin.handles, output.node, learn
        holds = tuple(i for i, (t, n) in enumerate(zip(tensors, holders)) if t.storage.handles > n)
        self.held_handles = [tensors[i].storage.handle for i in holds]
        assert output.node is not None
        self.base = output.node.base
        if learn and template.forward is None:
            recording = recorder.since(begin)
            handles = recording.memory_handle
            if (handles >= begin.handles).all() and _repeatable(recording):
                kinds = np.zeros(len(handles), np.int64)
                template.forward = Stamp(
                    recording.rebased(kinds, (begin.handles, 0, 0, 0)), kinds, tape.sequence - sequence, self.paths
                )
                template.output = Born.of(output, range(begin.handles, recorder.position().handles))
                template.bases = {self.paths: self.base}
                template.holds = holds
                template.input_owner = x.storage.owner if x.storage.owner != owner else None
        return self._outer(output.storage, output.shape, output.dtype, output.strides)

    def stamp_forward(self, tape: Tape, x: Tensor, arguments: tuple[Any, ...]) -> Tensor:
        template, recorder = self.template, tape.recorder
        assert template.forward is not None and template.output is not None
        self.first_handle = recorder.position().handles
        template.forward.append(tape, self.paths, (self.first_handle, 0, 0, 0))
        if template.input_owner is not None:
            x.storage.belongs_to(template.input_owner)
        self.base = template.base_at(self.paths, recorder)
        tensors = _tensors(arguments)
        self.held = [tensors[i] for i in template.holds]
        out = template.output
        storage = Storage.adopt(recorder, self.first_handle + out.handle)
        return self._outer(storage, out.shape, out.dtype, out.strides)

    def _outer(self, storage: Storage, shape: Shape, dtype: str, strides: Strides) -> Tensor:
        tensor = Tensor(storage, shape, dtype, strides)
        tensor.node, tensor.requires_grad = self, True  # type: ignore[assignment]
        return tensor

    # -- backward ----------------------------------------------------------------------------------------------
    def backward(self, tape: Tape, gradients: Gradients) -> Gradients:
        present = _present(self.slots)
        if self.micro_batch is not None:
            self.template.expected[self.micro_batch.is_first] = present
        if self.root is not None:
            return self._live_backward(tape, gradients, present)
        return self._stamp_backward(tape, gradients, present)

    def release(self) -> None:
        """The graph itself stays, as in PyTorch, until the loss dies: a reentrant region's node holds its arguments."""
        self.held = []

    def needs(self, index: int) -> bool:
        return self.edges[index] is not None

    def _live_backward(self, tape: Tape, gradients: Gradients, present: Present) -> Gradients:
        recorder, template, boundary = tape.recorder, self.template, self.boundary
        assert boundary is not None and gradients[0] is not None
        begin, sequence = recorder.position(), tape.sequence
        incoming_handle = gradients[0].storage.handle
        incoming_handles = gradients[0].storage.handles
        before = [_gradient_handle(slot) for slot in self.slots]
        run_backward(tape, self.root, gradients)
        result, boundary.gradient = boundary.gradient, None
        assert result is not None
        if self.learns and present not in template.backwards and template.forward is not None:
            learned = self._learned_backward(tape, begin, sequence, incoming_handle, incoming_handles, before, result)
            if learned is not None:
                template.backwards[present] = learned
        return [result]

    def _learned_backward(
        self, tape: Tape, begin: Any, sequence: int, incoming: int | None, incoming_handles: int,
        before: list[int | None], result: Tensor,
    ) -> Backward | None:  # fmt: skip
        template, recording = self.template, tape.recorder.since(begin)
        handles, first = recording.memory_handle, self.first_handle
        assert template.forward is not None
        own_forward = (handles >= first) & (handles < first + template.forward.recording.handles)
        own = handles >= begin.handles
        is_incoming = handles == incoming
        is_held = [handles == handle for handle in self.held_handles]
        choices = [own, is_incoming, own_forward, *is_held]
        if not np.any(choices, axis=0).all() or not _repeatable(recording) or tape.workspace_is_new(begin.handles):
            return None
        numbers = [BACKWARD, INCOMING, FORWARD, *range(HELD, HELD + len(is_held))]
        kinds = np.select(choices, numbers)
        bases = (first, begin.handles, incoming or 0, *(handle or 0 for handle in self.held_handles))
        now = tape.recorder.position().handles
        passes = range(first, first + template.forward.recording.handles), range(begin.handles, now)
        gradients = tuple(
            None if _gradient_handle(slot) == old else Born.of(_gradient(slot), *passes)
            for slot, old in zip(self.slots, before)
        )
        return Backward(
            stamp=Stamp(recording.rebased(kinds, bases), kinds, tape.sequence - sequence, self.paths),
            frees=tuple(bool(h.any()) for h in is_held),
            frees_incoming=bool(is_incoming.any()),
            incoming_handles=incoming_handles,
            gradient=None if result.storage.handle == incoming else Born.of(result, *passes),
            parameter_gradients=gradients,
        )

    def _stamp_backward(self, tape: Tape, gradients: Gradients, present: Present) -> Gradients:
        known = self.template.backwards.get(present)
        if known is None or gradients[0] is None:
            raise ReplayMismatch(f"{self.path}: backward before any layer of its kind showed it")
        incoming = gradients.pop()
        assert incoming is not None
        if incoming.storage.handles != known.incoming_handles or incoming.storage.handle is None:
            raise ReplayMismatch(f"{self.path}: the incoming gradient has other holders")
        first_backward = tape.recorder.position().handles
        held = [tensor.storage for tensor in self.held]
        if any(freed and storage.handle is None for freed, storage in zip(known.frees, held)):
            raise ReplayMismatch(f"{self.path}: what the layer saved is gone")
        first = (self.first_handle, first_backward, incoming.storage.handle, *(s.handle or 0 for s in held))
        known.stamp.append(tape, self.paths, first)
        for slot, born in zip(self.slots, known.parameter_gradients):
            if born is not None:
                _take_gradient(slot, born.tensor(tape, self.first_handle, first_backward))
        result = incoming if known.gradient is None else known.gradient.tensor(tape, self.first_handle, first_backward)
        freed_now = [storage for freed, storage in zip(known.frees, held) if freed]
        if known.frees_incoming:
            freed_now.append(incoming.storage)
        for storage in freed_now:
            storage.handle = None  # the stamp has issued the free
        self.held = []
        del incoming
        if any(storage.handles for storage in freed_now):
            raise ReplayMismatch(f"{self.path}: a freed tensor has holders left")
        return [result]


def _gradient(slot: Parameter) -> Tensor:
    assert isinstance(slot.tensor, Tensor) and slot.tensor.grad is not None
    return slot.tensor.grad


def _gradient_handle(slot: Parameter) -> int | None:
    leaf = slot.tensor
    return leaf.grad.storage.handle if isinstance(leaf, Tensor) and leaf.grad is not None else None


def _take_gradient(slot: Parameter, gradient: Tensor) -> None:
    leaf = slot.tensor
    if not isinstance(leaf, Tensor) or leaf.grad is not None:
        raise ReplayMismatch("a parameter has a gradient already")
    gradient.storage.belongs_to(Owner.GRADIENT)  # bytes that forward has saved, where a compiled block reuses them
    leaf.grad = gradient


def _repeatable(recording: Recording) -> bool:
    """Streams and the host wait only for events of the layer's own."""
    return bool((recording.rows >= 0).all())


def stampable(setup: Setup) -> bool:
    """A stamped layer's bytes are freed by its backward, which touches gradients alone; families know no layers."""
    optimizer = setup.optimizer
    steps_inside = optimizer is not None and (optimizer.in_backward or optimizer.offload is not None)
    return setup.mode != "eval" and not steps_inside and setup.family is None
