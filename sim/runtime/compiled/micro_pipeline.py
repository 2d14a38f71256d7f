"""Asynchronous tensor parallelism: products in as many pieces as ranks, beside the transfers of their tokens.

Inductor's pass finds an all-gather whose tokens products read as their rows, and a product that is reduce-scattered and
that nothing else reads. Each rank copies its tokens into symmetric memory, which is outside the allocator; pieces are
fetched from the other ranks', one after another; all products that read them multiply each as it is there, the rank's own
first. A product that is summed is made in pieces, each sent to its rank while the next is made; what has come from all is
added up by one kernel. What does not match meets as ever. Copy engines move the pieces, at the rate of a send inside a node;
barriers between steps are left out. Assumed: no profile has measured it.
Source: torch 2.13, _inductor/fx_passes/micro_pipeline_tp.py, distributed/_symmetric_memory, read there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sim.program.kernels import Collective
from sim.program.program import COMPUTE, TENSOR
from sim.runtime.compiled.buffers import Step
from sim.runtime.compiled.graph import Product, Value
from sim.runtime.ops.tensor_parallel import GROUP
from sim.runtime.tape import Tape
from sim.runtime.tensor import Tensor


@dataclass(slots=True)
class Pipelines:
    """Of one pass of a block: which steps go in pieces with which."""

    readers: dict[Step, list[Step]] = field(default_factory=dict)
    """Products that read what a step gathers; the first of them launches all."""
    leads: dict[Step, Step] = field(default_factory=dict)
    """The gather of a first product."""
    follows: set[Step] = field(default_factory=set)
    """Products that another one launches."""
    sent: dict[Step, Step] = field(default_factory=dict)
    """The product of a step that scatters."""


def pipelines(steps: list[Step], kept: Iterable[Value]) -> Pipelines:
    """What Inductor's pass matches; `kept` outlive the pass, so that they are made whole."""
    found = Pipelines()
    outlive = {value.storage for value in kept}
    makers = {value: step for step in steps for value in step.written}
    place = {step: number for number, step in enumerate(steps)}
    for step in steps:
        meets = _meets(step)
        if meets == "all_gather":
            readers = [other for other in steps if _rows(other) is step.written[0]]
            if readers:
                begins = place[readers[0]]
                together = [r for r in readers if all(place[makers[x]] < begins for x in r.reads if x in makers)]
                found.readers[step] = together
                found.leads[readers[0]] = step
                found.follows |= set(together[1:])
        elif meets == "reduce_scatter" and step.extern is not None:
            value = step.extern.inputs[0].storage
            maker = makers.get(value)
            others = [other for other in steps if other is not step and value in other.reads]
            if maker is not None and _product(maker) is not None and not others and value not in outlive:
                found.sent[step] = maker
    return found


def _meets(step: Step) -> str | None:
    return step.extern.extern.meets if step.extern is not None and step.extern.extern is not None else None


def _product(step: Step) -> Product | None:
    return step.extern.extern.product if step.extern is not None and step.extern.extern is not None else None


def _rows(step: Step) -> Value | None:
    product = _product(step)
    return product.rows.storage if product is not None and product.rows is not None else None


class Run:
    """The pieces of one pass while it runs."""

    def __init__(self, tape: Tape, found: Pipelines) -> None:
        self.tape = tape
        self.found = found
        self._sends = {maker: _ranks(scatter) for scatter, maker in found.sent.items()}
        self._arrives: dict[Step, list[int]] = {}
        """Per gather, when each piece of the other ranks is there."""

    def step(self, step: Step, inputs: list[Tensor], out: Tensor | None) -> Tensor | None:
        """Run a step's part of a pipeline: its result; None where it has no part."""
        if step in self.found.readers:
            return self._gather(step)
        if step in self.found.sent:
            return self._add_up(step, inputs[0])
        if step in self.found.leads:
            self._multiply(self.found.leads[step])
        elif step in self._sends:
            self._send(step)
        elif step not in self.found.follows:
            return None
        return out

    def _gather(self, step: Step) -> Tensor:
        """Fetch the pieces one after another."""
        ranks, value = _ranks(step), step.written[0]
        whole = self.tape.empty(value.shape, value.dtype)
        self.tape.recorder.memory_bound("aten::copy_", "copy", 2 * whole.bytes // ranks)  # where other ranks fetch it
        self.tape.recorder.stream_waits_stream(TENSOR, COMPUTE)
        self._arrives[step] = [self._transfer(whole.bytes // ranks, ranks, whole.dtype) for _ in range(ranks - 1)]
        return whole

    def _multiply(self, gather: Step) -> None:
        """Launch all products that read the tokens, piece by piece, the rank's own first."""
        for event in (None, *self._arrives.pop(gather)):
            if event is not None:
                self.tape.recorder.wait(COMPUTE, event)
            for reader in self.found.readers[gather]:
                self._piece(reader, _ranks(gather))

    def _send(self, step: Step) -> None:
        """Launch a product in pieces, each sent to its rank but the last, which is the rank's own."""
        ranks, written = self._sends[step], step.written[0]
        for number in range(ranks):
            self._piece(step, ranks)
            if number < ranks - 1:
                self.tape.recorder.stream_waits_stream(TENSOR, COMPUTE)
                self._transfer(written.bytes // ranks, ranks, written.dtype)

    def _add_up(self, step: Step, whole: Tensor) -> Tensor:
        """What has come from all ranks."""
        value = step.written[0]
        self.tape.recorder.stream_waits_stream(COMPUTE, TENSOR)
        return self.tape.pointwise("aten::sum", value.shape, value.dtype, None, whole.bytes, "reduce")

    def _piece(self, step: Step, ranks: int) -> None:
        product = _product(step)
        assert product is not None
        self.tape.recorder.gemm(product.name, product.m // ranks, product.n, product.k, product.dtype, 1)

    def _transfer(self, size_bytes: int, ranks: int, dtype: str) -> int:
        recorder = self.tape.recorder
        recorder.collective(Collective("ring_exchange", size_bytes, GROUP, ranks, dtype), TENSOR)
        return recorder.record(TENSOR)


def _ranks(step: Step) -> int:
    assert step.extern is not None and step.extern.extern is not None
    return step.extern.extern.ranks
