"""Steps of the chain toy on the same tape, with the same wrappers."""

from __future__ import annotations

from sim.model.calls import interpret
from sim.model.chain import Chain
from sim.model.config import ChainConfig
from sim.program.program import ALL_REDUCE, COMPUTE, Owner, Phase, Program
from sim.runtime import ops
from sim.runtime.recorder import OutOfMemory, Recorder
from sim.runtime.regions import apply_checkpoint, keep_entries
from sim.runtime.tape import DeviceFacts, Tape
from sim.runtime.tensor import Tensor
from sim.scenario.setup import Setup

assert ops  # importing it fills the tape's rules


def record_chain(setup: Setup, steps: int = 2, fail_at: int | None = None) -> Program:
    """What one rank issues: per step forward, backward, and the communication that nothing hides."""
    config = setup.model
    assert isinstance(config, ChainConfig)
    recorder = Recorder(fail_at)
    tape = Tape(recorder, DeviceFacts())
    model = Chain(config)
    apply_checkpoint(tape, model, setup.checkpoint)
    recomputes = keep_entries(model)
    with interpret(tape):
        recorder.mark("init")
        try:
            for number in range(steps):
                _step(tape, model, number, setup.batch.accumulation)
                _communicate(recorder, config, recomputes)
                recorder.mark(f"s{number}.end")
        except OutOfMemory:
            recorder.mark("oom")
    return recorder.program()


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
