"""Strategies as wrappers: which modules become FSDP units, whose saved tensors go to the host, which layers are alike."""

from __future__ import annotations

from typing import Any

from sim.model.language_model import LanguageModel, Linear
from sim.model.module import Module, Parameter
from sim.runtime.checkpoint import CheckpointWrapper
from sim.runtime.compiled.region import CompiledBlock, Plan
from sim.runtime.host_memory import HostMemory
from sim.runtime.offload import SaveOnCpu
from sim.runtime.regions import blocks_of, layers_of, stacks_of, structure
from sim.runtime.sharding.communication import Communication
from sim.runtime.sharding.fsdp2 import Unit
from sim.runtime.sharding.policy import UnitPolicy
from sim.runtime.streamed_offload import LayerHook, Streams
from sim.runtime.tape import Tape
from sim.runtime.templates import Repeat
from sim.runtime.tensor import Tensor as TapeTensor
from sim.scenario.parallel import Fsdp
from sim.scenario.setup import Offload, Precision, Setup


class SaveLayerOnCpu(Module):
    """A layer under save_on_cpu. Of a checkpointed one only what the region keeps (its inputs) goes to the host."""

    def __init__(self, tape: Tape, module: Module, memory: HostMemory) -> None:
        self.tape = tape
        self.module = module
        self.memory = memory
        self.path = module.path

    def forward(self, *arguments: Any) -> Any:
        self.tape.hooks.append(SaveOnCpu(self.tape, self.memory))
        try:
            return self.module(*arguments)
        finally:
            self.tape.hooks.pop()


class StreamedLayer(Module):
    """A layer among some whose saved tensors leave on side streams; `leaves`: this one's do.

    All layers have the wrapper, so that backward knows which comes next.
    """

    def __init__(self, streams: Streams, module: Module, first: bool, leaves: bool) -> None:
        self.streams = streams
        self.module = module
        self.first = first
        self.leaves = leaves
        self.path = module.path

    def forward(self, *arguments: Any) -> Any:
        tape = self.streams.tape
        if not tape.grad_enabled:
            return self.module(*arguments)
        hook = self.streams.last = LayerHook(self.streams, self.first)
        if self.leaves:
            tape.hooks.append(hook)
        try:
            output = self.module(*arguments)
        finally:
            if self.leaves:
                tape.hooks.pop()
        node = TapeTensor.of(output).node
        if node is not None:
            node.pre_hooks = [*(node.pre_hooks or []), hook.before_backward]
        return output


def apply_offload(tape: Tape, model: Module, offload: Offload) -> None:
    """Wrap the layers (or regions) whose saved tensors go to the host."""
    layers = layers_of(model)
    chosen = [_is_chosen(layer, offload) for layer in layers.items]
    if offload.streams == "side":
        streams = Streams(tape, offload)
        layers.items = [StreamedLayer(streams, layer, not i, chosen[i]) for i, layer in enumerate(layers.items)]
        return
    memory = HostMemory(tape.recorder, offload.pinned, offload.pinned_pool)
    layers.items = [SaveLayerOnCpu(tape, layer, memory) if c else layer for layer, c in zip(layers.items, chosen)]


def _is_chosen(layer: Module, offload: Offload) -> bool:
    """A region counts by its first layer."""
    if offload.what == "checkpoint_inputs" and not isinstance(layer, CheckpointWrapper):
        return False
    return offload.layers is None or int(layer.path.rpartition(".")[2]) in offload.layers


def apply_compile(tape: Tape, model: Module, float8: str | None) -> list[Module]:
    """Compile every layer, whatever wraps it so far; layers of equal structure share what is traced. Returns, per layer,
    the module that FSDP wraps."""
    layers = layers_of(model)
    plans: dict[object, dict[Any, Plan]] = {}
    layers.items = [CompiledBlock(tape, layer, plans.setdefault(structure(layer), {}), float8) for layer in layers]
    return list(layers)


def convert_to_float8(blocks: list[Module]) -> None:
    """convert_to_float8_training: linear layers inside blocks whose sides are multiples of 16 (the head is none of them)."""
    for block in blocks:
        for _, child in block.children():
            if isinstance(child, Linear):
                child.float8 = not any(size % 16 for size in child.weight.shape)
            else:
                convert_to_float8([child])


def unit_policy(fsdp: Fsdp, precision: Precision, reshard: bool | int, is_block: bool = False) -> UnitPolicy:
    """PyTorch's MixedPrecisionPolicy and the rest, for one unit."""
    mixed = not precision.autocast and precision.compute != precision.parameters
    return UnitPolicy(
        shard_ranks=fsdp.degree,
        replicas=fsdp.replicas,
        reshard_after_forward=_meant(reshard, fsdp.degree),
        original_dtype=precision.parameters,
        param_dtype=precision.compute if mixed else None,
        matrix_dtype="fp8" if fsdp.float8_all_gather and is_block else None,
        reduce_dtype=precision.reduce,
        cast_inputs=precision.compute if mixed and fsdp.cast_forward_inputs else None,
        cpu_offload=fsdp.cpu_offload,
        reduce_scatter_buffers=fsdp.reduce_scatter_buffers,
    )


def _meant(reshard: bool | int, degree: int) -> bool | int:
    """A group of one rank means no reshard, the whole group means True (_fsdp_init.py, _get_post_forward_mesh_info)."""
    if isinstance(reshard, bool) or reshard not in (1, degree):
        return reshard
    return reshard != 1


def apply_fsdp(
    tape: Tape, model: Module, slots: list[Parameter], blocks: list[Module], outer: list[Module], setup: Setup,
    host: HostMemory,
) -> Communication:  # fmt: skip
    """fully_shard every block, then the root; `outer` are the blocks as wrapped by checkpointing, `host` is where CPU
    offload keeps parameters and gradients."""
    fsdp, precision = setup.fsdp, setup.precision
    assert fsdp is not None
    communication = Communication(host)
    wrapped = outer if fsdp.wrap == "fsdp(checkpoint)" else blocks
    own: list[tuple[str, Module, list[Parameter], bool | int]] = []
    last = len(blocks) - 1
    for i, block in enumerate(blocks):
        reshard = fsdp.reshard_after_forward
        decided: bool | int = i < last if reshard == "torchtitan" else reshard
        if setup.pipeline is not None and reshard == "torchtitan":
            decided = False  # its default with a pipeline: micro-batches would gather again and again
        own.append((f"layers.{i}", wrapped[i], block.managed_parameters(), decided))
    taken = {id(p) for _, _, unit_slots, _ in own for p in unit_slots}
    rest = [p for p in slots if id(p) not in taken]
    root_reshard = fsdp.root_reshard_after_forward
    parts = vars(model)
    last_unit: tuple[str, list[Module], list[Parameter], UnitPolicy] | None = None
    if fsdp.units == "torchtitan_2026":
        embedding, norm, head = parts["tok_embeddings"], parts["norm"], parts["output"]
        Unit(tape, communication, "root", [model], [], unit_policy(fsdp, precision, False))
        if embedding is not None:
            embedding_policy = unit_policy(fsdp, precision, setup.pipeline is None)
            Unit(tape, communication, "tok_embeddings", [embedding], embedding.managed_parameters(), embedding_policy)
        if head is not None:
            tail = norm.managed_parameters() + head.managed_parameters()
            last_unit = ("norm+output", [norm, head], tail, unit_policy(fsdp, precision, False))
    else:
        reshard_root = root_reshard if root_reshard and _honours_root_reshard(setup.torch) else False
        Unit(tape, communication, "root", [model], rest, unit_policy(fsdp, precision, reshard_root))
    for name, module, unit_slots, reshard_block in own:
        Unit(
            tape, communication, name, [module], unit_slots, unit_policy(fsdp, precision, reshard_block, is_block=True)
        )
    if last_unit is not None:
        Unit(tape, communication, *last_unit)
    _prefetch_lists(communication, fsdp)
    return communication


def _honours_root_reshard(torch: str) -> bool:
    """An explicit reshard_after_forward of the root has an effect since torch 2.8 (its default became None there);
    2.7.1 was seen to ignore it, 2.14.1 to honour it (FSDP.md 5)."""
    major, minor = (int(part) for part in torch.split(".")[:2])
    return (major, minor) >= (2, 8)


def _prefetch_lists(communication: Communication, fsdp: Fsdp) -> None:
    """set_modules_to_forward_prefetch / _backward_prefetch over the blocks."""
    blocks = [u for u in communication.units if u.name.startswith("layers.")]
    for i, unit in enumerate(blocks):
        if fsdp.forward_prefetch:
            unit.forward_prefetch = blocks[i + 1 : i + 1 + fsdp.forward_prefetch]
        if fsdp.backward_prefetch is not None and i:
            unit.backward_prefetch = blocks[max(0, i - fsdp.backward_prefetch) : i][::-1]


def mark_repeats(model: Module, again: bool = False, kinds: int = 0) -> None:
    """Tell the tape which layers are alike, so that it may record one and stamp the others (sim.runtime.replay).

    Units inside a layer are left alone: gathering is the outermost module's affair or nobody's. `again`: a pipeline
    stage, which runs for every micro-batch; its first and last layers are kinds of their own, since what comes in is
    held outside. Kinds are numbered from `kinds`.
    """
    if len(stacks_of(model)) > 1:
        return  # their blocks share tensors that need gradients
    alike: dict[object, list[tuple[Module, tuple[str, ...]]]] = {}
    layers = list(layers_of(model))
    post_norm = isinstance(model, LanguageModel) and model.post_norm
    for number, layer in enumerate(layers):
        blocks = blocks_of(layer)
        if any(block.hooks is not None for block in blocks if block is not layer):
            continue
        paths = tuple(block.path for block in blocks)
        trained = tuple(slot.requires_grad for slot in layer.parameters())
        is_last = number == len(layers) - 1
        edge = ((again and (is_last or not number)) or (post_norm and is_last)) and number + 1
        alike.setdefault((structure(layer), trained, edge), []).append((layer, paths))
    for kind, same in enumerate(alike.values(), kinds):
        for index, (layer, paths) in enumerate(same):
            layer.repeat = Repeat(kind, index, len(same), paths, tuple(layer.parameters()), again)
