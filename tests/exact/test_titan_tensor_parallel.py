"""torchtitan's tensor parallelism beside PyTorch's own DTensor, over a process group that moves nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from sim.model import functional as F
from sim.model.calls import interpret
from sim.model.catalogue import build_model, preset_shapes
from sim.model.llama import TitanFeedForward
from sim.program.program import Mem, Owner, Phase, Program, Row
from sim.runtime.recorder import Recorder
from sim.runtime.tape import DeviceFacts, Tape
from sim.runtime.tensor import Tensor

RANKS, TOKENS, HIDDEN, FFN, VOCAB = 4, 32, 512, 1536, 64
Forward = Any


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield init_device_mesh("cpu", (RANKS,))
    destroy_process_group()


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(HIDDEN, FFN, bias=False)
        self.w2 = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


def parallel_feed_forward(mesh: DeviceMesh) -> nn.Module:
    block = nn.ModuleDict({"feed_forward": FeedForward()}).to(torch.bfloat16)
    plan = {
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }
    return parallelize_module(block, mesh, plan)


def saved_by(function: Forward, parameters: list[torch.Tensor], *given: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Bytes of what autograd saves beside parameters and arguments, and the result."""
    known = {_local(p).untyped_storage().data_ptr() for p in (*parameters, *given)}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = _local(tensor).untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function(*given)
    return sum(kept.values()), out


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(local, "elem", local)


def played(batch: int) -> tuple[Program, int]:
    """The same layer on the tape, forward and backward; bytes alive after forward beside x and the result."""
    recorder = Recorder()
    tape = Tape(recorder, DeviceFacts())
    config = build_model("llama-tiny", preset_shapes("llama-tiny"), "torchtitan")
    module = TitanFeedForward(config, RANKS)
    with interpret(tape), tape.phase(Phase.INIT, Owner.PARAMETER):
        for slot in module.parameters():
            slot.tensor = tape.empty(slot.shape, "bf16")
            slot.tensor.requires_grad = True
    with interpret(tape), tape.phase(Phase.FORWARD, Owner.ACTIVATION):
        x = tape.empty((batch, TOKENS // RANKS, HIDDEN), "bf16")
        x.requires_grad = True
        first = recorder.position().events
        out = Tensor.of(module(x))
        recorder.mark("forward")
        events = recorder.position().events
        tape.backward(out, tape.empty(out.shape, "bf16"))
        result = out.storage.handle
        del out
    program = recorder.program()
    alive: dict[int, int] = {}
    for event in range(first, events):
        handle = int(program.mem_handle[event])
        if program.mem_kind[event] == Mem.ALLOC and program.owners[handle] == Owner.ACTIVATION:
            alive[handle] = int(program.mem_bytes[event])
        elif program.mem_kind[event] == Mem.FREE:
            alive.pop(handle, None)
    return program, sum(size for handle, size in alive.items() if handle != result)


def collectives(program: Program) -> Counter[str]:
    rows = np.flatnonzero(program.row_kind == Row.COLLECTIVE).tolist()
    return Counter(program.collectives[program.row_argument[row]].kind for row in rows)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_layer_saves_and_exchanges_what_dtensor_does(mesh: DeviceMesh, batch: int) -> None:
    block = parallel_feed_forward(mesh)
    x = torch.randn(batch, TOKENS // RANKS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with CommDebugMode() as debug:
        saved, out = saved_by(block["feed_forward"], list(block.parameters()), x)
        assert out.shape == x.shape
        out.backward(torch.ones_like(out))
    program, alive = played(batch)
    assert alive == saved
    counts = {str(op).rpartition(".")[2]: n for op, n in debug.get_comm_counts().items()}
    made = collectives(program)
    assert made["all_gather"] == counts["all_gather_into_tensor"] == 2
    assert made["reduce_scatter"] == counts["reduce_scatter_tensor"] == 2


def test_the_loss_over_a_shared_vocabulary_agrees_three_times(mesh: DeviceMesh) -> None:
    local = torch.randn(TOKENS, VOCAB // RANKS, requires_grad=True)
    logits = DTensor.from_local(local, mesh, [Shard(-1)], run_check=False)
    targets = torch.zeros(TOKENS, dtype=torch.int64)
    with CommDebugMode() as debug, loss_parallel():
        loss = functional.cross_entropy(logits, targets)
        loss.backward()
    recorder = Recorder()
    tape = Tape(recorder, DeviceFacts())
    with interpret(tape), tape.phase(Phase.FORWARD, Owner.LOSS):
        ours = tape.empty((TOKENS, VOCAB // RANKS), "fp32")
        ours.requires_grad = True
        result = Tensor.of(F.parallel_cross_entropy(ours, tape.empty((TOKENS,), "int64"), RANKS))
        tape.backward(result)
        del result
    assert sum(debug.get_comm_counts().values()) == collectives(recorder.program())["all_reduce"] == 3
