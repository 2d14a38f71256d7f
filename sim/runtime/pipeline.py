"""One rank of a pipeline: its stages' forwards and backwards in the schedule's order, and what moves between ranks.

As torch.distributed.pipelining's stages: a graph per micro-batch, inputs that are leaves, a stage's output kept until
its backward. Every transfer has its own event; a stage's compute waits for what it needs, NCCL's stream for what it
sends. A sent tensor is let go when the next one goes the same way (1F1B waits for it then; the others at the end).
Where transfers overlap nothing (Megatron's 1F1B, and its interleaved schedule of 2022), the host waits for all that was
sent and received before it goes on (torch.cuda.synchronize in megatron/p2p_communication.py; batch_p2p_sync today), so
that every pass of a stage begins with an empty queue. DeepSpeed's engine leaves that to the streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, Protocol

from sim.model.calls import Shape
from sim.program.kernels import ITEM_BYTES, Transfer
from sim.program.periods import Position
from sim.program.program import (
    COMPUTE,
    RECEIVE_NEXT,
    RECEIVE_PREVIOUS,
    SEND_NEXT,
    SEND_PREVIOUS,
    Owner,
    Phase,
    Row,
)
from sim.runtime.ops.tensor_parallel import block
from sim.runtime.recorder import Operators
from sim.runtime.schedules import Action, Kind, Step, orders, parts_of, with_transfers
from sim.runtime.schedules.folding import Fold, fold
from sim.runtime.split_backward import SplitBackward
from sim.runtime.stage_offload import StageOffload, without_input
from sim.runtime.tape import Tape
from sim.runtime.templates import MicroBatch
from sim.runtime.tensor import Tensor
from sim.runtime.unfold import Folded
from sim.runtime.weight_store import StoredWeights
from sim.scenario.parallel import Pipeline
from sim.scenario.setup import Offload

SEND, RECEIVE = Operators.number("pipeline::send"), Operators.number("pipeline::receive")
EARLY = ("interleaved", "breadth-first", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
"""Schedules that receive as soon as possible (torch's _PipelineScheduleRuntime); the others right before they need it."""


class Stage(Protocol):
    """A part of the model on this rank."""

    is_first: bool
    is_last: bool

    def first_input(self, micro_batch: int) -> Tensor | None:
        """The first stage's input, if it needs a gradient."""

    def forward(self, hidden: Tensor | None, micro_batch: int) -> tuple[Tensor, Any]:
        """Hidden states (the last: the loss) and what else must live until the backward. `hidden` is what came in."""

    def before_backward(self, is_last: bool) -> None:
        """A backward begins; `is_last`: no further micro-batch comes in this step."""

    def after_backwards(self) -> None:
        """All backwards of a step have run, and the last one's result was sent."""


@dataclass(frozen=True, slots=True)
class Wire:
    """What is handed on: hidden states of this shape and dtype, and gradients like them.

    `kept`: a buffer per micro-batch is made once and stays (PipelineStage); else at every receive (Megatron), where
    also a stage's output is let go once it has been sent.
    """

    shape: Shape
    dtype: str
    kept: bool
    shares: int = 1
    """Each of so many tensor-parallel ranks sends a part of what all have, and they gather what arrives (Megatron's
    scatter_gather_tensors_in_pipeline)."""


@dataclass(slots=True)
class _Run:
    """A micro-batch between its forward and its backward: the leaf that came in, what came out, what else is kept."""

    leaf: Tensor | None
    output: Tensor
    rest: Any
    kept: bool
    """All activations: checkpointed regions do not recompute."""
    split: SplitBackward | StoredWeights | None = None


@dataclass(slots=True)
class PipelineRank:
    """Rank `rank`; `stages` are its own, by number in the pipeline. `folds`: leave out what repeats in the steady state."""

    tape: Tape
    pipeline: Pipeline
    micro_batches: int
    rank: int
    stages: dict[int, Stage]
    wire: Wire
    keeps: int
    """So many micro-batches in flight per stage are not recomputed."""
    folds: bool = False
    offload: Offload | None = None
    """Of stage_activations: bundles leave and come back between actions."""
    received: list[Action] = field(init=False)
    """In the whole schedule."""
    fold: Fold | None = field(init=False, default=None)
    folded: list[Folded] = field(init=False, default_factory=list)
    """Where it was, in every step of the script."""
    steps: Sequence[Step] = field(init=False)
    _bundles: StageOffload | None = field(init=False, default=None)
    _runs: dict[tuple[int, int], _Run] = field(init=False, default_factory=dict)
    _buffers: dict[Action, Tensor] = field(init=False, default_factory=dict)  # by what is received
    _arrived: dict[Action, int] = field(init=False, default_factory=dict)  # events
    _made: dict[Action, Tensor] = field(init=False, default_factory=dict)  # to send, or for a stage of this rank
    _sent: dict[int, tuple[Tensor, int]] = field(init=False, default_factory=dict)  # by stream
    _blocking: list[int] = field(init=False, default_factory=list)
    """Events of sends that the host waits for before it goes on."""
    _input_gradients: list[Tensor] = field(init=False, default_factory=list)
    """Those of split backwards stay as `.grad` of the received buffers until the next step (stage_backward_input)."""
    _returned: Counter[int] = field(init=False, default_factory=Counter)  # backwards done, by stage
    _done: list[int] = field(init=False, default_factory=list)
    """Stages whose backwards have all run, which have not been told yet."""

    def __post_init__(self) -> None:
        self.steps = pipeline_steps(self.pipeline, self.micro_batches)[self.rank]
        self.fold = fold(self.steps) if self.folds else None
        self.received = [step.action for step in self.steps if step.receives is not None]
        if self.fold is not None:
            self.steps = self.fold.steps
            self.micro_batches = len({step.action.micro_batch for step in self.steps})
        if self.offload is not None:
            computed = [step.action for step in self.steps if step.receives is None and step.sends is None]
            self._bundles = StageOffload(self.tape, self.offload, computed)

    def _make_buffers(self) -> None:
        """Buffers for everything that will be received, stage by stage: inputs first, then gradients."""
        for action in sorted(self.received, key=lambda a: (_receiving_stage(a), a.passes_back, a.micro_batch)):
            self._buffers[action] = self._buffer(action)

    def run(self, mark: Callable[[str], None]) -> None:
        """All actions of a step; `mark` is told the end of each forward ("fwd3") and backward ("bwd3")."""
        self._input_gradients.clear()
        if self.wire.kept and not self._buffers:
            with self.tape.phase(Phase.FORWARD, Owner.ACTIVATION):
                self._make_buffers()
        place = 0
        passed: list[Position] = []
        for step in self.steps:
            if self.fold is not None:
                passed.append(self.tape.recorder.position())
            if step.receives is not None:
                self._receive(step.action, step.receives)
            elif step.sends is not None:
                self._send(step.action, step.sends)
            else:
                if self._bundles is not None:
                    self._bundles.before(place)
                place += 1
                self._tell_done()
                self._compute(step.action)
                mark(f"{'fwd' if step.action.kind is Kind.FORWARD else 'bwd'}{step.action.micro_batch}")
        passed.append(self.tape.recorder.position())
        self._wait_for_sent()
        for _, sent in self._sent.values():
            self.tape.recorder.wait(COMPUTE, sent)
        self._sent.clear()
        self._tell_done()
        self._returned.clear()
        if (fold := self.fold) is not None:
            oldest, before, begin, end = (passed[at] for at in (fold.oldest, fold.before, fold.begin, fold.end))
            self.folded.append(Folded(len(self.folded), oldest, before, begin, end, fold.times, fold.shift))
            self._name_unused_buffers()

    def _name_unused_buffers(self) -> None:
        """Those of micro-batches that are left out belong to what the first one's came to belong to (checkpoints)."""
        for action, buffer in self._buffers.items():
            if action.micro_batch >= self.micro_batches:
                buffer.storage.belongs_to(self._buffers[action._replace(micro_batch=0)].storage.owner)

    # -- computing ---------------------------------------------------------------------------------------------
    def _compute(self, action: Action) -> None:
        self._wait_for_sent()
        if action.kind is Kind.FORWARD:
            self._forward(action)
        elif action.kind is Kind.BACKWARD:
            self._backward(action)
        elif action.kind is Kind.INPUT_GRADIENT:
            self._input_gradient(action)
        else:
            self._weight_gradients(action)

    def _wait_for_sent(self) -> None:
        for event in self._blocking:
            self._wait(event)
        self._blocking.clear()

    def _wait(self, event: int) -> None:
        """Compute waits for a transfer; where nothing overlaps, so does the host."""
        if self.pipeline.overlap_p2p or not self.pipeline.p2p_sync:
            self.tape.recorder.wait(COMPUTE, event)
        else:
            self.tape.recorder.sync(event)

    def _forward(self, action: Action) -> None:
        stage = self.stages[action.stage]
        if stage.is_first:
            leaf = stage.first_input(action.micro_batch)
        else:
            leaf = self._take(action._replace(stage=action.stage - 1)).detach()
            leaf.requires_grad = True
        in_order = self.pipeline.schedule != "breadth-first"
        is_first = action.micro_batch == (0 if in_order else self.micro_batches - 1)
        keeps = sum(run.kept for (number, _), run in self._runs.items() if number == action.stage) < self.keeps
        self.tape.micro_batch = MicroBatch(action.micro_batch, is_first, in_order)
        self.tape.recomputes = not keeps
        self.tape.first_micro_batch = is_first
        with self._bundles.saving(action) if self._bundles is not None else nullcontext():
            given = leaf
            if self._bundles is not None and leaf is not None:
                leaf, given = without_input(self.tape, leaf)
            output, rest = stage.forward(given, action.micro_batch)
            del given
        self.tape.micro_batch, self.tape.recomputes = None, True
        if not stage.is_last:
            assert (output.shape, output.dtype) == (self.wire.shape, self.wire.dtype), "stages hand on something else"
            self._made[action] = output.detach()
        self._runs[action.stage, action.micro_batch] = _Run(leaf, output, rest, keeps)

    def _backward(self, action: Action) -> None:
        run = self._runs.pop((action.stage, action.micro_batch))
        self._begin_backward(action)
        self.tape.backward(run.output, self._incoming(action))
        self._hand_back(action, run)

    def _input_gradient(self, action: Action) -> None:
        """A first stage without a leaf has nothing to hand back: its whole backward comes with the weights, but for
        Megatron, which puts off products alone."""
        run = self._runs[action.stage, action.micro_batch]
        if not self.wire.kept:
            run.split = StoredWeights(self.tape, run.output)
            run.split.input_gradient(self._incoming(action))
            self._hand_back(action, run)
            run.leaf = run.rest = None
            return
        if run.leaf is None:
            return
        run.split = SplitBackward(self.tape, run.output, run.leaf)
        run.split.input_gradient(self._incoming(action))
        self._hand_back(action, run)
        if self.wire.kept and action.stage > 0:
            handed = self._made[action._replace(kind=Kind.BACKWARD)]
            self._input_gradients.append(handed.detach())

    def _weight_gradients(self, action: Action) -> None:
        run = self._runs.pop((action.stage, action.micro_batch))
        self._begin_backward(action)
        if run.split is None:
            self.tape.backward(run.output, self._incoming(action))
        else:
            run.split.weight_gradients()

    def _begin_backward(self, action: Action) -> None:
        self._returned[action.stage] += 1
        is_last = self._returned[action.stage] == self.micro_batches
        self.stages[action.stage].before_backward(is_last)
        if is_last:
            self._done.append(action.stage)

    def _tell_done(self) -> None:
        while self._done:
            self.stages[self._done.pop(0)].after_backwards()

    def _incoming(self, action: Action) -> Tensor | None:
        """The gradient of the output; None for the loss."""
        if self.stages[action.stage].is_last:
            return None
        return self._take(Action(action.stage + 1, Kind.BACKWARD, action.micro_batch))

    def _hand_back(self, action: Action, run: _Run) -> None:
        if run.leaf is None:
            return
        gradient, run.leaf.grad = run.leaf.grad, None
        assert gradient is not None
        gradient.storage.belongs_to(Owner.ACTIVATION_GRADIENT)
        if action.stage > 0:
            self._made[action._replace(kind=Kind.BACKWARD)] = gradient

    # -- moving ------------------------------------------------------------------------------------------------
    def _take(self, made: Action) -> Tensor:
        """What another stage has made, on this rank or received."""
        if made in self._made:
            return self._made.pop(made)
        arrived = self._arrived.pop(made)
        self._wait(arrived)
        if self.wire.shares > 1:
            return self._gathered(made)
        return self._buffers[made] if self.wire.kept else self._buffers.pop(made)

    def _gathered(self, made: Action) -> Tensor:
        """gather_split_1d_tensor: the whole of it, of which a part has arrived."""
        with self._moving(made, RECEIVE):
            part = self._buffers.pop(made)
            whole = self.tape.empty(self.wire.shape, self.wire.dtype, owner=part.storage.owner)
            block(self.tape, "all_gather", whole, self.wire.shares)
        return whole

    def _buffer(self, action: Action) -> Tensor:
        """What arrives: the whole, or this rank's part, flat."""
        owner = Owner.ACTIVATION_GRADIENT if action.passes_back else Owner.ACTIVATION
        shape = self.wire.shape if self.wire.shares == 1 else (prod(self.wire.shape) // self.wire.shares,)
        return self.tape.empty(shape, self.wire.dtype, owner=owner)

    def _receive(self, action: Action, sender: int) -> None:
        recorder = self.tape.recorder
        with self._moving(action, RECEIVE):
            if not self.wire.kept:
                self._buffers[action] = self._buffer(action)
            stream = RECEIVE_NEXT if self._goes_up(action) else RECEIVE_PREVIOUS
            recorder.stream_waits_stream(stream, COMPUTE)
            recorder.transfer(Row.RECEIVE, self._transfer(action, sender, self.rank), stream)
            self._arrived[action] = recorder.record(stream)

    def _send(self, action: Action, receiver: int) -> None:
        recorder = self.tape.recorder
        with self._moving(action, SEND):
            stream = SEND_PREVIOUS if self._goes_up(action) else SEND_NEXT
            before = self._sent.pop(stream, None)
            if before is not None and self.pipeline.schedule == "1f1b":
                recorder.wait(COMPUTE, before[1])
            del before
            payload = self._made.pop(action)
            recorder.stream_waits_stream(stream, COMPUTE)
            recorder.transfer(Row.SEND, self._transfer(action, self.rank, receiver), stream)
            self._sent[stream] = payload, recorder.record(stream)
            if not self.pipeline.overlap_p2p:
                self._blocking.append(self._sent[stream][1])
            if not self.wire.kept and not action.passes_back:
                run = self._runs[action.stage, action.micro_batch]
                run.output = _without_bytes(self.tape, run.output)

    @contextmanager
    def _moving(self, action: Action, operator: int) -> Iterator[None]:
        with self.tape.phase(Phase.BACKWARD if action.passes_back else Phase.FORWARD, Owner.OTHER):
            self.tape.recorder.operator(operator)
            yield

    def _goes_up(self, action: Action) -> bool:
        """To the rank before: gradients do, on a V's way back hidden states do."""
        on_way_back = self.pipeline.folded and action.stage - action.passes_back >= self.pipeline.degree
        return action.passes_back != on_way_back

    def _transfer(self, action: Action, sender: int, receiver: int) -> Transfer:
        size = prod(self.wire.shape) * ITEM_BYTES[self.wire.dtype] // self.wire.shares
        return Transfer(size, sender, receiver, action.stage, action.micro_batch, action.passes_back)


@cache
def pipeline_steps(pipeline: Pipeline, micro_batches: int) -> list[list[Step]]:
    """What every rank does in a step."""
    made = orders(pipeline.schedule, pipeline.degree, micro_batches, pipeline.chunks)
    parts = parts_of(pipeline.degree, pipeline.chunks, pipeline.folded)
    slots = pipeline.schedule == "interleaved" and not pipeline.overlap_p2p
    return with_transfers(made, parts, early=pipeline.schedule in EARLY and not slots, slots=slots)


def _receiving_stage(action: Action) -> int:
    return action.stage - 1 if action.passes_back else action.stage + 1


def _without_bytes(tape: Tape, output: Tensor) -> Tensor:
    """Megatron's deallocate_output_tensor: the graph without the bytes; one element stays."""
    empty = tape.empty((1,), output.dtype, owner=Owner.ACTIVATION)
    empty.node, empty.output_index, empty.requires_grad = output.node, output.output_index, True
    return empty
