"""The check of a scenario on GPUs: one process (or group of ranks) per strategy, so that none finds another's memory.

A step takes as long as its slowest rank. Each strategy leaves a trace and a snapshot in a folder of its own, for
`python -m sim diff`. No GPU has run this yet; tests run it on processors.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from calibration.check.bench import SNAPSHOT, TRACE
from calibration.check.clock import spread, typical
from calibration.check.outcome import Line, Outcome
from calibration.check.step import problems_of
from calibration.check.worker import STEPS
from calibration.measure.device import open_device
from sim.api import Outcome as Simulated
from sim.api import load, simulate_setup
from sim.model.config import ModelConfig
from sim.scenario.setup import Setup

WORKER = "calibration.check.worker"
LAST_LINES = 12


@dataclass(frozen=True, slots=True)
class Ran:
    """What one strategy's ranks measured: times of the slowest in every step, peaks of the largest."""

    step_ns: list[float]
    allocated_bytes: int
    reserved_bytes: int

    @classmethod
    def of(cls, folder: Path, ranks: int) -> Ran:
        found = [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
        return cls(
            [max(times) for times in zip(*(one["step_ns"] for one in found))],
            max(one["allocated_bytes"] for one in found),
            max(one["reserved_bytes"] for one in found),
        )


def check_scenario(
    scenario: Path, device: str, folder: Path, tell: Callable[[str, int, int], None] | None = None
) -> Outcome:
    """Play and run every strategy of a scenario. Raises ValueError for strategies that cannot be run here, all at once,
    and for a process that failed, with the end of what it said; CalibrationError without a GPU."""
    setups = load(scenario).strategies
    wrong = [f"{setup.name}: {problem}" for setup in setups for problem in problems_of(setup)]
    if wrong:
        raise ValueError("\n".join((f"{scenario}: what the check cannot run", *wrong)))
    if device == "cuda":
        open_device(device)
    lines: list[Line] = []
    for number, setup in enumerate(setups):
        if tell is not None:
            tell(f"running {setup.name}", number, len(setups))
        ran = run(scenario, setup, device, folder / setup.name.replace("/", "_"))
        lines.append(_line(simulate_setup(setup), ran, lines[0] if lines else None))
    title = torch.cuda.get_device_name() if device == "cuda" else "processor"
    machine = {"device": title, "threads": torch.get_num_threads(), "torch": torch.__version__, "traces": str(folder)}
    return Outcome(machine=machine, rounds=STEPS, lines=lines, host={})


def run(scenario: Path, setup: Setup, device: str, folder: Path) -> Ran:
    """One strategy's steps, in processes of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("rank*.json"), folder / TRACE, folder / SNAPSHOT):
        old.unlink(missing_ok=True)
    ranks = setup.mesh.size
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", WORKER, str(scenario), setup.name, str(folder), "--device", device]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[-LAST_LINES:])
        raise ValueError(f"{setup.name}: its process ended with {done.returncode}:\n{said}")
    return Ran.of(folder, ranks)


def _line(simulated: Simulated, ran: Ran, plain: Line | None) -> Line:
    setup, time = simulated.setup, simulated.time
    assert isinstance(setup.model, ModelConfig)
    predicted, measured = time.step_ns if time is not None else float("nan"), typical(ran.step_ns)
    return Line(
        network=setup.model.family,
        batch=setup.batch.micro_batch,
        strategy=setup.name,
        predicted_ns=predicted,
        measured_ns=measured,
        spread=spread(ran.step_ns),
        predicted_slowdown=predicted / (plain.predicted_ns if plain is not None else predicted),
        measured_slowdown=measured / (plain.measured_ns if plain is not None else measured),
        predicted_peak_bytes=simulated.steady.allocated_bytes,
        measured_peak_bytes=ran.allocated_bytes,
        predicted_reserved_bytes=simulated.steady.reserved_bytes,
        measured_reserved_bytes=ran.reserved_bytes,
    )
