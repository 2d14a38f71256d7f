"""Parameters and buffers go to the device, sharded where the run shards them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.model.llama import TitanLlama
from sim.model.megatron_gpt import MegatronGpt
from sim.model.module import Buffer
from sim.model.quantized import Nf4Weight
from sim.program.kernels import ITEM_BYTES
from sim.program.program import Owner, Phase
from sim.runtime.sharding.parameters import ShardedParameter
from sim.runtime.tensor import Tensor

if TYPE_CHECKING:
    from sim.runtime.train import TrainingRun


def place_parameters(run: TrainingRun) -> list[Tensor]:
    """One block per parameter and buffer, in the order of module.to. Returns the parameters on the device."""
    placed = run.family.place() if run.family is not None else None
    dtype = run.setup.precision.parameters
    units = (unit for communication in run.communications for unit in communication.units)
    sharded: dict[int, ShardedParameter] = {id(p.slot): p for unit in units for p in unit.group.parameters}
    for name, slot in run.tensors:
        run.recorder.at(Phase.INIT, name.rpartition(".")[0])
        if isinstance(slot, Nf4Weight):
            run.quantizer.place(slot, dtype)
            continue
        if isinstance(slot, Buffer):
            slot.tensor = run.tape.empty(slot.shape, slot.dtype, owner=Owner.OTHER)
            continue
        if placed is not None:
            continue
        shard = sharded.get(id(slot))
        if shard is not None and run.on_host:
            run.host.take(shard.shard_elements * ITEM_BYTES[dtype])
            continue
        shape = slot.shape if shard is None else shard.local_shape()
        tensor = run.tape.empty(shape, slot.dtype or dtype)
        tensor.requires_grad = slot.requires_grad
        slot.tensor = tensor
        if shard is not None:
            shard.sharded = tensor
    held = [slot.tensor for _, slot in run.slots if isinstance(slot.tensor, Tensor)]
    return held if placed is None else placed


def place_buffers(run: TrainingRun) -> None:
    """RoPE caches; torchtitan's is a placeholder from to_empty, replaced by the computed one."""
    for model in run.models:
        if isinstance(model, TitanLlama):
            _place_rope(run, model)
        elif isinstance(model, MegatronGpt):
            run.recorder.default_owner = int(Owner.OTHER)
            model.make_rope(run.setup.local_tokens)


def _place_rope(run: TrainingRun, model: TitanLlama) -> None:
    config, seq_len = run.config, run.setup.batch.seq_len
    placeholder = None
    if not run.on_host:
        if config.rope == "complex":
            placeholder = run.tape.empty((seq_len, config.head_dim // 2), "complex64", owner=Owner.OTHER)
        else:
            dtype = "bf16" if run.setup.precision.parameters == "bf16" else "fp32"
            placeholder = run.tape.empty((seq_len, 2 * config.head_dim), dtype, owner=Owner.OTHER)
    run.recorder.default_owner = int(Owner.OTHER)
    model.make_rope(seq_len)
    del placeholder
