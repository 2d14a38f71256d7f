"""From a training script to the program that it issues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.model.calls import interpret
from sim.program.program import Program
from sim.runtime.recorder import OutOfMemory
from sim.runtime.unwinding import unwind

if TYPE_CHECKING:
    from sim.runtime.train import TrainingRun


def recorded(run: TrainingRun, steps: int, stamps: bool) -> Program:
    """The program of a run of `steps` steps, or until its recorder refuses an allocation."""
    recorder = run.recorder
    run.tape.stamps = stamps
    with interpret(run.tape):
        try:
            run.initialize()
            for number in range(steps):
                run.step(number)
        except OutOfMemory as error:
            unwind(error.__traceback__)
            recorder.mark("oom")
    program = recorder.program()
    run.finish()
    return program
