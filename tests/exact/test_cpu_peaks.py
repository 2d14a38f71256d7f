"""Peaks and recomputed operators of every strategy are those that PyTorch showed on a CPU (cpu_peaks.yaml)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ruamel.yaml import YAML

from sim.model.calls import interpret
from sim.model.module import Module
from sim.program.program import Mem, Owner, Phase
from sim.runtime.checkpoint import CheckpointWrapper
from sim.runtime.cpu import CpuRecorder
from sim.runtime.regions import apply_checkpoint
from sim.runtime.selective import ATTENTION, Selective
from sim.runtime.tensor import Tensor
from sim.scenario.setup import Checkpoint, Region
from tests.exact.cpu_models import CpuGpt, CpuLlama
from tests.exact.cpu_tape import CountingTape

BATCH, LENGTH = 4, 256
PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "attention")
FORMS: dict[str, Checkpoint | None] = {
    "none": None,
    "ckpt1": Checkpoint(),
    "ckpt1_reentrant": Checkpoint(reentrant=True),
    "ckpt1_noearly": Checkpoint(early_stop=False),
    "ckpt2": Checkpoint(segment=2),
    "ckpt4": Checkpoint(segment=4),
    "every_other": Checkpoint(layers=(Region(), None) * 4),
    "seq2": Checkpoint(sequential=2),
    "seq4": Checkpoint(sequential=4),
    "seq4_reentrant": Checkpoint(sequential=4, reentrant=True),
    "seqL": Checkpoint(sequential=8),
    "ckpt_all_as_one": Checkpoint(segment=8),
    "nested2x2": Checkpoint(nested=(2, 2)),
    "nested2x2x2": Checkpoint(nested=(2, 2, 2)),
    "sac_mm_sdpa": Checkpoint(save=PRODUCTS),
    "sac_every2mm": Checkpoint(),
    "sac_sdpa": Checkpoint(save=("attention",)),
    "sac_cpu_offload_policy": Checkpoint(),
    "save_on_cpu": None,
}
"""As e2_mem.py names them. On a CPU save_on_cpu keeps the tensors themselves; MUST_CPU_OFFLOAD recomputes in eager mode."""


def every_second_product() -> Selective:
    return Selective(ATTENTION | {"aten.bmm"}, frozenset({"aten.mm", "aten.addmm"}))


def play(build: Callable[[], Any], name: str) -> tuple[int, int]:
    """Peak bytes over what was there before forward, and operators that ran again."""
    recorder = CpuRecorder()
    tape = CountingTape(recorder)
    model = build()
    apply_checkpoint(tape, model, FORMS[name])
    if name == "sac_every2mm":
        model.layers.items = [
            CheckpointWrapper(tape, layer.module, every_second_product)  # type: ignore[attr-defined]
            for layer in model.layers
        ]
    with interpret(tape):
        with tape.phase(Phase.INIT, Owner.PARAMETER):
            if isinstance(model, CpuLlama):
                model.place()
            for _, slot in model.named_parameters():
                tensor = tape.empty(slot.shape, "bf16")
                tensor.requires_grad = True
                slot.tensor = tensor
            tokens, targets = (tape.empty((BATCH, LENGTH), "int64") for _ in range(2))
        recorder.mark("static")
        with tape.phase(Phase.FORWARD, Owner.ACTIVATION):
            loss = Tensor.of(model(tokens, targets))
        tape.backward(loss)
        recorder.mark("end")
    program = recorder.program()
    first, last = (mark.memory_events for mark in program.marks)
    sizes = np.zeros(len(program.owners), np.int64)
    allocates = program.mem_kind == Mem.ALLOC
    sizes[program.mem_handle[allocates]] = program.mem_bytes[allocates]
    signed = np.where(allocates, 1, -1) * sizes[program.mem_handle]
    return int(np.cumsum(signed[first:last]).max()), tape.operators_again


MODELS: dict[str, Callable[[], Module]] = {
    "gpt/L8/sdpa/V1024": CpuGpt,
    "gpt/L8/sdpa/V16384": partial(CpuGpt, vocab=16384),
    "gpt/L8/math/V1024": partial(CpuGpt, written_out=True),
    "llama/L8/sdpa/V1024": CpuLlama,
}
PEAKS: dict[str, dict[str, list[int]]] = YAML(typ="safe").load(Path(__file__).parent / "cpu_peaks.yaml")
CASES = [(model, name) for model, strategies in PEAKS.items() for name in strategies]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_peak_and_operators_are_those_of_pytorch(model: str, name: str) -> None:
    assert play(MODELS[model], name) == tuple(PEAKS[model][name])


def test_every_measured_run_is_compared() -> None:
    shared = Path(os.environ.get("SIM_SHARED", Path(__file__).parents[2].parent / "shared"))
    path = shared / "data" / "pytorch" / "GOLDEN.json"
    if not path.exists():
        pytest.skip("needs shared/data/pytorch/GOLDEN.json")
    figures = json.loads(path.read_text())["mem_peaks_over_static"]
    measured = {
        name: [found["real_fwdbwd"], found["n_recompute_ops"]]
        for name, found in figures.items()
        if found.get("real_fwdbwd") is not None
    }
    assert measured == {f"{model}/{name}": PEAKS[model][name] for model, name in CASES}
