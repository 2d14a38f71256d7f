"""Steps of the chain toy on the same tape, with the same wrappers."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from sim.model.calls import interpret
from sim.model.chain import Chain
from sim.model.config import ChainConfig
from sim.model.module import ModuleList
from sim.program.program import ALL_REDUCE, COMPUTE, Owner, Phase, Program
from sim.runtime import ops
from sim.runtime.pipeline import PipelineRank, Stage, Wire
from sim.runtime.recorder import OutOfMemory, Recorder
from sim.runtime.regions import apply_checkpoint, keep_entries
from sim.runtime.schedules import stages_of
from sim.runtime.tape import DeviceFacts, Tape
from sim.runtime.tensor import Tensor
from sim.scenario.parallel import Pipeline
from sim.scenario.setup import Setup

assert ops  # importing it fills the tape's rules


def record_chain(setup: Setup, steps: int = 2, fail_at: int | None = None, rank: int = 0) -> Program:
    """What one rank issues: per step forward, backward, and the communication that nothing hides."""
    config = setup.model
    assert isinstance(config, ChainConfig)
    recorder = Recorder(fail_at)
    tape = Tape(recorder, DeviceFacts())
    pipeline, recomputes = None, False
    model = Chain(config)
    if setup.pipeline is not None:
        pipeline, recomputes = _pipeline_rank(tape, setup, setup.pipeline, config, rank)
    else:
        apply_checkpoint(tape, model, setup.checkpoint)
        recomputes = keep_entries(model)
    with interpret(tape):
        recorder.mark("init")
        try:
            for number in range(steps):
                if pipeline is not None:
                    pipeline.run(lambda part, number=number: recorder.mark(f"s{number}.{part}"))  # type: ignore[misc]
                else:
                    _step(tape, model, number, setup.batch.accumulation)
                _communicate(recorder, config, recomputes)
                recorder.mark(f"s{number}.end")
        except OutOfMemory:
            recorder.mark("oom")
    return recorder.program()


class ChainStage:
    """Some of the chain's layers as a pipeline stage; also the first one's input has a gradient."""

    def __init__(self, tape: Tape, model: Chain, is_first: bool, is_last: bool) -> None:
        self.tape, self.model = tape, model
        self.is_first, self.is_last = is_first, is_last

    def first_input(self, micro_batch: int) -> Tensor | None:
        x = self.tape.empty((0,), "uint8")
        x.requires_grad = True
        return x

    def forward(self, hidden: Tensor | None, micro_batch: int) -> tuple[Tensor, Any]:
        assert hidden is not None
        with self.tape.phase(Phase.FORWARD, Owner.ACTIVATION):
            return Tensor.of(self.model(hidden)), None

    def after_backwards(self) -> None:
        """Nothing is reduced."""

    def before_backward(self, is_last: bool) -> None:
        pass


def _pipeline_rank(
    tape: Tape, setup: Setup, pipeline: Pipeline, config: ChainConfig, rank: int
) -> tuple[PipelineRank, bool]:
    """The rank's stages, which hand on tensors without bytes; and whether anything is recomputed."""
    begins = list(accumulate(pipeline.placement, initial=0))
    stages: dict[int, Stage] = {}
    recomputes = False
    for number in stages_of(rank, pipeline.degree, pipeline.chunks, pipeline.folded):
        model = Chain(config)
        model.layers = ModuleList(model.layers.items[begins[number] : begins[number + 1]], begins[number])
        apply_checkpoint(tape, model, setup.checkpoint)
        recomputes |= keep_entries(model)
        stages[number] = ChainStage(tape, model, number == 0, number == len(pipeline.placement) - 1)
    wire = Wire((0,), "uint8", kept=True)
    keeps = setup.checkpoint.keep_micro_batches if setup.checkpoint is not None else 0
    return PipelineRank(tape, pipeline, setup.batch.accumulation, rank, stages, wire, keeps), recomputes


def _step(tape: Tape, model: Chain, number: int, accumulation: int) -> None:
    for micro_batch in range(accumulation):
        with tape.phase(Phase.FORWARD, Owner.ACTIVATION):
            x = tape.empty((0,), "uint8")
            x.requires_grad = True
            loss = Tensor.of(model(x))
        tape.recorder.mark(f"s{number}.fwd{micro_batch}")
        tape.backward(loss)
        tape.recorder.mark(f"s{number}.bwd{micro_batch}")
        del loss


def _communicate(recorder: Recorder, config: ChainConfig, recomputes: bool) -> None:
    """A transfer on a stream of its own that compute waits for, and the host then too."""
    duration_ns = config.exposed_communication_ns + (config.recompute_communication_ns if recomputes else 0)
    recorder.at(Phase.BACKWARD, "")
    if duration_ns:
        recorder.stream_waits_stream(ALL_REDUCE, COMPUTE)
        recorder.fixed("chain::communication", duration_ns, ALL_REDUCE)
        recorder.stream_waits_stream(COMPUTE, ALL_REDUCE)
    recorder.sync(recorder.record(COMPUTE))
