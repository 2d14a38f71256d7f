"""torch.utils.checkpoint(use_reentrant=False): nothing is saved inside a region, which runs again when backward asks.

TAPE.md section 6, TAPE_LLAMA_FSDP.md section 2. The region's frame holds its inputs; it lives as long as a saved tensor
with its hook does. Recomputation begins in the first unpack and, with early stop, ends as the last tensor is packed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from sim.model.module import Module
from sim.program.program import PHASE_SHIFT, Owner, Phase
from sim.runtime.autograd import SavedTensor
from sim.runtime.reentrant import checkpoint_reentrant
from sim.runtime.selective import Selective
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


class _Holder:
    """Stands for a saved tensor; `key` finds the recomputed one."""

    __slots__ = ("__weakref__", "key")

    def __init__(self) -> None:
        self.key: _Key | None = None


class _Key:
    __slots__ = ("__weakref__",)


class _EarlyStop(Exception):
    """The last saved tensor has been recomputed."""


class _Frame:
    """One region's run: its function, its inputs (saved under the hooks active outside), what was packed inside."""

    def __init__(
        self,
        tape: Tape,
        function: Callable[..., Any],
        inputs: tuple[Any, ...],
        selective: Selective | None,
        early_stop: bool,
    ) -> None:
        self.generator = tape.generator_state()
        self.function = function
        self.selective = selective
        self.early_stop = early_stop
        self.autocast_dtype = tape.autocast_dtype
        self.holders: list[weakref.ref[_Holder]] = []
        self.recomputed: weakref.WeakKeyDictionary[_Key, Tensor] = weakref.WeakKeyDictionary()
        self.packed_again = 0
        self.done = False
        for tensor in inputs:
            if tensor.requires_grad:
                tensor.storage.belongs_to(Owner.CHECKPOINT)
        self.inputs = [SavedTensor(tape, tensor) for tensor in inputs]
        self.origins = [(tensor.requires_grad, tensor.node, tensor.output_index) for tensor in inputs]

    def unpack_inputs(self) -> list[Tensor]:
        """The inputs, each with its place in the first run's graph (SavedVariable::unpack), wherever a hook kept it."""
        tensors = [saved.unpack() for saved in self.inputs]
        for tensor, (requires_grad, node, index) in zip(tensors, self.origins):
            tensor.requires_grad, tensor.node, tensor.output_index = requires_grad, node, index
        return tensors


class _ForwardHook:
    """Active while the region runs forward: every saved tensor becomes a holder."""

    def __init__(self, tape: Tape, frame: _Frame) -> None:
        self.tape = tape
        self.frame = frame

    def pack(self, tensor: Tensor) -> _Holder:
        holder = _Holder()
        self.frame.holders.append(weakref.ref(holder))
        return holder

    def unpack(self, holder: _Holder) -> Tensor:
        frame = self.frame
        if not frame.done:
            _recompute(self.tape, frame)
            frame.done = True
        assert holder.key is not None
        tensor = frame.recomputed[holder.key]
        holder.key = None  # each unpack takes its entry away
        return tensor


class _RecomputeHook:
    """Active while the region runs again: what would be saved answers the holders of the first run, in order."""

    def __init__(self, frame: _Frame) -> None:
        self.frame = frame

    def pack(self, tensor: Tensor) -> Tensor:
        frame = self.frame
        holder = frame.holders[frame.packed_again]()
        frame.packed_again += 1
        kept = tensor.detach() if tensor.requires_grad else tensor
        if holder is not None:
            holder.key = _Key()
            frame.recomputed[holder.key] = kept
        if frame.early_stop and frame.packed_again == len(frame.holders):
            raise _EarlyStop
        return kept

    def unpack(self, tensor: Tensor) -> Tensor:
        return tensor


def _recompute(tape: Tape, frame: _Frame) -> None:
    """Run the region again with gradients enabled, under its own autocast context."""
    inputs = frame.unpack_inputs()
    recorder = tape.recorder
    before = recorder.base, recorder.where, recorder.default_owner
    recorder.resume(recorder.base & ((1 << PHASE_SHIFT) - 1) | Phase.RECOMPUTE << PHASE_SHIFT)
    recorder.default_owner = int(Owner.RECOMPUTED)
    recorder.host("checkpoint_region")
    tape.hooks.append(_RecomputeHook(frame))
    outer = tape.selective
    try:
        with tape.grad_mode(True), tape.autocast(frame.autocast_dtype) if frame.autocast_dtype else nullcontext():
            if frame.selective is not None:
                tape.selective = frame.selective
                frame.selective.recomputing = True
            frame.function(*inputs)
    except _EarlyStop:
        pass
    finally:
        tape.hooks.pop()
        tape.selective = outer
    if frame.selective is not None:
        recorder.host("selective_policy", frame.selective.take_dispatched())
    recorder.base, recorder.where, recorder.default_owner = before
    del inputs


def checkpoint(
    tape: Tape,
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    selective: Selective | None = None,
    early_stop: bool = True,
) -> Any:
    """Run `function(*inputs)` so that backward runs it again. Without gradients it is a plain call."""
    if not tape.grad_enabled:
        return function(*inputs)
    frame = _Frame(tape, function, inputs, selective, early_stop)
    tape.recorder.host("checkpoint_region")
    tape.hooks.append(_ForwardHook(tape, frame))
    outer = tape.selective
    del frame
    try:
        if selective is not None:
            tape.selective = selective
        return function(*inputs)
    finally:
        tape.hooks.pop()
        tape.selective = outer
        if selective is not None:
            tape.recorder.host("selective_policy", selective.take_dispatched())


class CheckpointWrapper(Module):
    """checkpoint_wrapper(module): the module's place in the model, its forward a region."""

    def __init__(
        self,
        tape: Tape,
        module: Module,
        policy: Callable[[], Selective] | None = None,
        early_stop: bool = True,
        reentrant: bool = False,
        keywords: bool = False,
    ) -> None:
        self.tape = tape
        self.module = module
        self.policy = policy
        self.early_stop = early_stop
        self.reentrant = reentrant
        self.keywords = keywords
        self.path = module.path

    def forward(self, *arguments: Any) -> Any:
        if not self.tape.recomputes:
            return self.module(*arguments)
        if self.reentrant:
            return checkpoint_reentrant(self.tape, self.module, arguments, self.keywords)
        selective = self.policy() if self.policy is not None else None
        return checkpoint(self.tape, self.module, arguments, selective, self.early_stop)

    def __getattr__(self, name: str) -> Any:
        """What the wrapper lacks is the module's, as in PyTorch's CheckpointWrapper."""
        return getattr(self.__dict__["module"], name)
