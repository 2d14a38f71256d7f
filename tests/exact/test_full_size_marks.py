"""Whole Llama-3.1-8B steps against recorded peaks of every phase, through the scenarios that people run."""

from __future__ import annotations

from pathlib import Path

import pytest
from ruamel.yaml import YAML

import sim
from sim.engine.memory import play_memory
from sim.runtime.record import record
from sim.timeline.memory import MemoryTimeline

ROOT = Path(__file__).resolve().parents[2]
RECORDED = YAML(typ="safe").load((ROOT / "tests/exact/full_size_marks.yaml").read_text())
RECORDING_DEVICE_BYTES = 400 << 30
ANCHOR_BYTES = 512  # a block that the recording script holds from its start
DEC_2024 = ("optimizer.variant=foreach", "optimizer.zero_grad=start", "model.norm=manual")
RUNS = {
    "8b_fsdp8_b1_none": ("fsdp_ckpt", "none", ()),
    "8b_fsdp8_b1_op": ("fsdp_ckpt", "selective", ()),
    "8b_fsdp8_b1_layer2": ("fsdp_ckpt", "every-2-layers", ()),
    "8b_fsdp8_b1_full": ("fsdp_ckpt", "full", ()),
    "8b_fsdp64_b1_op": ("fsdp_ckpt", "selective", ("cluster.nodes=8", "parallel.fsdp.degree=64")),
    "8b_titan2412_fsdp128_b2_op": ("llama3_8b_128gpu", "selective", DEC_2024),
}


def simulated_peaks(memory: MemoryTimeline, phase: str) -> dict[str, int]:
    """Peaks between the mark before s2.<phase> and that mark."""
    marks = memory.program.marks
    index = next(i for i, mark in enumerate(marks) if mark.name == f"s2.{phase}")
    first, last = marks[index - 1].memory_events, marks[index].memory_events

    def peak(counter: str) -> int:
        values = getattr(memory, f"{counter}_bytes")
        return int(max(values[first - 1], values[first:last].max(initial=0)))

    return {counter: peak(counter) for counter in ("allocated", "active", "reserved")}


@pytest.mark.parametrize("name", RUNS)
def test_every_phase_of_a_full_size_step_peaks_as_recorded(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file, strategy, overrides = RUNS[name]
    scenario = sim.load(ROOT / f"scenarios/{file}.yaml", overrides)
    (setup,) = [s for s in scenario.strategies if s.name == strategy]
    program = record(setup, steps=3)
    memory = play_memory(program, setup.allocator, RECORDING_DEVICE_BYTES, RECORDING_DEVICE_BYTES, setup.torch)
    lines, differences = [], []
    for phase, recorded in RECORDED[name].items():
        for counter, simulated in simulated_peaks(memory, phase).items():
            expected = recorded[counter] - (ANCHOR_BYTES if counter != "reserved" else 0)
            lines.append(
                f"{name:28s} {phase:5s} {counter:9s} {simulated:15,d} {expected:15,d} {simulated - expected:+d}"
            )
            differences.append(simulated - expected)
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert differences == [0] * len(differences)
