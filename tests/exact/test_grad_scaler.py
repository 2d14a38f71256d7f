"""GradScaler beside PyTorch's own: the operators around a step, in order, and who waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sim.program.program import Owner, Phase, Program, Row
from sim.runtime.record import record
from sim.scenario import load_text
from sim.scenario.setup import Setup
from tests.unit.scenario_texts import problems

TEXT = """
model: {preset: gpt-tiny, implementation: nanogpt}
cluster: {gpu: v100, gpus_per_node: 1}
batch: {micro_batch: 1, seq_len: 128}
precision: {parameters: fp32, compute: fp16, grad_scaler: true}
optimizer: {variant: VARIANT, clip_norm: CLIP}
"""
SCALING = ("aten._amp_foreach_non_finite_check_and_unscale_", "aten._amp_update_scale_", "aten.reciprocal", "aten.item")


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.pauses = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).rpartition(".")[0].replace("aten._local_scalar_dense", "aten.item")
        if name in SCALING and not self.pauses:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def torchs(variant: str, clips: bool) -> list[str]:
    """Operators of a second step of PyTorch's own, on the CPU."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=variant == "fused", foreach=variant == "foreach")
    scaler = torch.amp.GradScaler("cpu")
    seen = Seen()
    own_step = optimizer.step

    def quiet_step(*arguments: Any, **named: Any) -> Any:  # its own counters are no scaler's
        seen.pauses = True
        result = own_step(*arguments, **named)
        seen.pauses = False
        return result

    optimizer.step = quiet_step  # type: ignore[method-assign]
    for step in range(2):
        scaler.scale(model(torch.ones(8)).sum()).backward()
        with seen:
            if clips:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        if not step:
            seen.names.clear()
        optimizer.zero_grad()
    return seen.names


def setup_of(variant: str, clip: str, text: str = TEXT) -> Setup:
    return load_text(text.replace("VARIANT", variant).replace("CLIP", clip), "scaler").strategies[0]


def ours(program: Program) -> list[str]:
    """The same operators of the simulated second step; item: the host waits in the optimizer's phase."""
    rows = {mark.name: mark.rows for mark in program.marks}
    found = []
    for row in range(rows["s0.end"], rows["s1.end"]):
        kernel = program.kernels[program.row_argument[row]].name if program.row_kind[row] == Row.LAUNCH else ""
        name = kernel.replace("::", ".")
        if name in SCALING:
            found.append(name)
        elif program.row_kind[row] == Row.SYNC and program.where(int(program.row_where[row]))[0] == Phase.OPTIMIZER:
            found.append("aten.item")
    return found


@pytest.mark.parametrize("clip", ["1.0", "null"])
@pytest.mark.parametrize("variant", ["fused", "foreach"])
def test_operators_and_waits_are_pytorchs(variant: str, clip: str) -> None:
    theirs = [name for name in torchs(variant, clip != "null") if not (variant == "fused" and name == "aten.item")]
    assert ours(record(setup_of(variant, clip))) == theirs


def test_its_state_is_a_factor_and_a_count() -> None:
    scaled, plain = (record(setup_of("fused", "1.0", text)) for text in (TEXT, TEXT.replace(", grad_scaler: true", "")))

    def after(program: Program) -> int:
        alive = {}
        for event in range(len(program.mem_kind)):
            handle = int(program.mem_handle[event])
            if program.mem_kind[event] == 0 and program.owners[handle] == Owner.OPTIMIZER:
                alive[handle] = int(program.mem_bytes[event])
            elif program.mem_kind[event] == 1:
                alive.pop(handle, None)
        return sum(alive.values())

    assert after(scaled) - after(plain) == 4 + 4


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("compute: fp16", "compute: fp32", "fp16 autocast"),
        ("parameters: fp32", "parameters: fp16", "fp16 autocast"),
        ("optimizer:", "parallel: {fsdp: {degree: 1}}\noptimizer:", "under ddp only"),
        ("clip_norm: 1.0", "clip_norm: null, in_backward: true", "optimizer.in_backward"),
        ("optimizer:", "mode: no_grad\noptimizer:", "nothing to check"),
    ],
)
def test_what_does_not_fit_is_told(old: str, new: str, says: str) -> None:
    text = TEXT.replace("VARIANT", "fused").replace("CLIP", "1.0")
    assert old in text
    found = problems(text.replace(old, new, 1))
    assert any(says in message for _, _, message in found), found
