"""A backward that runs inside a backward: what a function makes again, and the walk over its graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sim.program.program import PHASE_SHIFT, Owner, Phase
from sim.runtime.autograd import Gradients, run_backward
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


@contextmanager
def recomputing(tape: Tape) -> Iterator[None]:
    """What runs inside belongs to a recomputation, with gradients."""
    recorder = tape.recorder
    before = recorder.base, recorder.where, recorder.default_owner
    recorder.resume(recorder.base & ((1 << PHASE_SHIFT) - 1) | Phase.RECOMPUTE << PHASE_SHIFT)
    recorder.default_owner = int(Owner.RECOMPUTED)
    with tape.grad_mode(True):
        yield
    recorder.base, recorder.where, recorder.default_owner = before


def backward_inside(tape: Tape, inputs: list[Tensor], output: Tensor, gradients: Gradients) -> Gradients:
    """torch.autograd.backward(output, gradients) inside a backward: the gradients of `inputs`."""
    recorder = tape.recorder
    before = recorder.base, recorder.where, recorder.default_owner
    incoming = gradients[0]
    assert incoming is not None
    if output.node is not None:
        run_backward(tape, output.node, [incoming.detach()])  # a second holder: the caller keeps its own
    recorder.base, recorder.where, recorder.default_owner = before
    gradients.clear()
    results = [tensor.grad for tensor in inputs]
    for gradient in results:
        if gradient is not None:
            gradient.storage.belongs_to(recorder.default_owner)
    return results
