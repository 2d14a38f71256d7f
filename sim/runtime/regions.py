"""Which parts of a network become regions of a checkpoint, and what makes two layers alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain, pairwise
from typing import Any

from sim.model.calls import Tensor
from sim.model.chain import Chain, ChainLayer, KeptEntry
from sim.model.config import ChainConfig
from sim.model.language_model import LanguageModel
from sim.model.module import Module, ModuleList
from sim.model.parts import discardable_of, parts_of
from sim.runtime.checkpoint import CheckpointWrapper
from sim.runtime.compiled.region import CompiledBlock
from sim.runtime.discarding import Consumer, DiscardedOutput
from sim.runtime.selective import Selective, policy
from sim.runtime.tape import Tape
from sim.scenario.setup import Checkpoint, Region


class Segment(Module):
    """Consecutive layers (or regions of them) as one function."""

    def __init__(self, layers: list[Module]) -> None:
        self.layers = ModuleList(layers)
        self.path = layers[0].path

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, *rest)
        return x


def layers_of(model: Module) -> ModuleList:
    """The repeated blocks of a network."""
    layers = vars(model)["layers"]
    assert isinstance(layers, ModuleList)
    return layers


def stacks_of(model: Module) -> tuple[ModuleList, ...]:
    """All stacks of repeated blocks."""
    return model.stacks() if isinstance(model, LanguageModel) else (layers_of(model),)


class _Wrap:
    """Makes regions; choices that are alike share one policy, so that their layers are alike."""

    def __init__(self, tape: Tape, model: Module) -> None:
        self.tape = tape
        self.keywords = isinstance(model, LanguageModel) and model.passes_keywords
        self.parts = parts_of(model.config) if isinstance(model, LanguageModel) else {}
        self.discardable = discardable_of(model.config) if isinstance(model, LanguageModel) else {}
        self._policies: dict[tuple[str, ...], Callable[[], Selective]] = {}

    def __call__(self, choice: Region, layers: list[Module]) -> Module:
        """One region over consecutive layers, or over parts of a single one."""
        if choice.inside or choice.discard:
            (layer,) = layers
            for name in chain.from_iterable(self.parts[part] for part in choice.inside):
                if _has(layer, name):
                    _replace(layer, name, partial(self._region, choice))
            for name, reader in chain.from_iterable(self.discardable[part] for part in choice.discard):
                if _has(layer, reader):
                    discarded = _replace(layer, name, partial(DiscardedOutput, self.tape))
                    _replace(layer, reader, partial(Consumer, discarded=discarded))
            return layer
        return self._region(choice, layers[0] if len(layers) == 1 else Segment(layers))

    def _region(self, choice: Region, module: Module) -> CheckpointWrapper:
        select = self._policies.setdefault(choice.save, policy(choice.save)) if choice.save else None
        return CheckpointWrapper(self.tape, module, select, choice.early_stop, choice.reentrant, self.keywords)


def _has(layer: Module, name: str) -> bool:
    """Has this layer the module at a dotted name? A layer with experts has no plain MLP, and the other way round."""
    found: Any = layer
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None


def _replace(layer: Module, name: str, wrap: Callable[[Module], Any]) -> Any:
    """Put a wrapper in the place of the module at a dotted name; returns it."""
    *owners, last = name.split(".")
    for owner in owners:
        layer = getattr(layer, owner)
    wrapper = wrap(getattr(layer, last))
    while isinstance(layer, CheckpointWrapper | Consumer):
        layer = layer.module
    setattr(layer, last, wrapper)
    return wrapper


def apply_checkpoint(tape: Tape, model: Module, checkpoint: Checkpoint | None) -> list[Module]:
    """Replace layers by regions. Returns, per layer, the module that FSDP wraps when it wraps outside."""
    stacks = stacks_of(model)
    if checkpoint is None:
        return [block for layers in stacks for block in layers]
    if isinstance(model, LanguageModel):
        model.begin_checkpointing()
    wrap = _Wrap(tape, model)
    takes_first = isinstance(model, LanguageModel) and model.checkpoints_first
    return [outer for layers in stacks for outer in _wrap_stack(layers, checkpoint, wrap, takes_first)]


def _wrap_stack(layers: ModuleList, checkpoint: Checkpoint, wrap: _Wrap, takes_first: bool) -> list[Module]:
    blocks = list(layers)
    region = partial(wrap, checkpoint)
    if checkpoint.layers:
        chosen = zip(blocks, checkpoint.layers)
        layers.items = [block if choice is None else wrap(choice, [block]) for block, choice in chosen]
    elif checkpoint.nested:
        layers.items = _nested(blocks, checkpoint.nested, region)
    elif checkpoint.boundaries:
        layers.items = [region(part) for part in _cut(blocks, checkpoint.boundaries)]
    elif checkpoint.sequential is not None:
        size = len(blocks) // checkpoint.sequential
        *parts, last = _cut(blocks, tuple(size * number for number in range(1, checkpoint.sequential)))
        layers.items = [*map(region, parts), *last]
    else:
        layers.items = _every(blocks, checkpoint, region, takes_first)
    own = {id(blocks_of(module)[0]): module for module in layers.items if len(blocks_of(module)) == 1}
    return [own.get(id(block), block) for block in blocks]


def _every(
    blocks: list[Module], checkpoint: Checkpoint, region: Callable[[list[Module]], Module], takes_first: bool
) -> list[Module]:
    """Of the segments every k-th, the first or the last of each k, within the first so many layers."""
    limit = len(blocks) if checkpoint.first is None else checkpoint.first
    size, modules = checkpoint.segment, []
    remainder = 0 if takes_first else checkpoint.every - 1
    for number, start in enumerate(range(0, len(blocks), size)):
        part = blocks[start : start + size]
        if number % checkpoint.every == remainder and start + len(part) <= limit:
            modules.append(region(part))
        else:
            modules.extend(part)
    return modules


def _nested(layers: list[Module], counts: tuple[int, ...], region: Callable[[list[Module]], Module]) -> list[Module]:
    """Regions of regions; the parts of a level are as equal as they can be, longer ones first."""
    if not counts:
        return layers
    size, longer = divmod(len(layers), counts[0])
    starts = tuple(number * size + min(number, longer) for number in range(1, counts[0]))
    return [region(_nested(part, counts[1:], region)) for part in _cut(layers, starts)]


def _cut(layers: list[Module], starts: tuple[int, ...]) -> list[list[Module]]:
    """Consecutive parts; `starts`: where each but the first begins."""
    edges = (0, *starts, len(layers))
    return [layers[start:stop] for start, stop in pairwise(edges)]


def blocks_of(layer: Module) -> list[Module]:
    """The blocks of a network that are in a layer as it is wrapped."""
    if isinstance(layer, CheckpointWrapper | CompiledBlock):
        return blocks_of(layer.module)
    if isinstance(layer, Segment):
        return [block for part in layer.layers for block in blocks_of(part)]
    return [layer]


def structure(module: Module) -> tuple[object, ...]:
    """What a layer is made of and how it is wrapped: equal for layers that run alike on equal shapes."""
    own: tuple[object, ...] = ()
    if isinstance(module, CheckpointWrapper):
        own = (module.policy, module.early_stop, module.reentrant)
    return (type(module), *own, *(structure(child) for _, child in module.children()))


def keep_entries(model: Chain) -> bool:
    """Put the kept entry in front of every region of a chain. Returns whether anything is recomputed.

    The first region inside another has the same entry and keeps no second one.
    """
    recomputes = any(isinstance(layer, CheckpointWrapper) for layer in model.layers)
    _keep_entries(model.layers, model.config, has_entry=False)
    return recomputes


def _keep_entries(layers: ModuleList, config: ChainConfig, has_entry: bool) -> None:
    for place, layer in enumerate(list(layers)):
        if not isinstance(layer, CheckpointWrapper):
            continue
        first = blocks_of(layer)[0]
        assert isinstance(first, ChainLayer)
        if isinstance(layer.module, Segment):
            _keep_entries(layer.module.layers, config, has_entry=True)
        if place or not has_entry:
            layers[place] = KeptEntry(layer, config, first.number)
