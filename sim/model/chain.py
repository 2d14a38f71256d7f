"""The chain: the textbook's network. Each layer saves so many bytes and takes so long; nothing else exists.

Between layers flows a tensor without bytes. A checkpoint must keep its region's entry, which has `entry_bytes`.
"""

from __future__ import annotations

from sim.model.calls import Tensor, call
from sim.model.config import ChainConfig
from sim.model.module import Module, ModuleList


class ChainLayer(Module):
    def __init__(self, config: ChainConfig, number: int) -> None:
        self.config = config
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return call("chain_layer", x, self.config, self.number)


class Chain(Module):
    """Layers one after another; `forward` starts from a tensor without bytes that needs a gradient."""

    def __init__(self, config: ChainConfig) -> None:
        self.config = config
        self.layers = ModuleList([ChainLayer(config, i) for i in range(config.layers)])
        self.name_paths()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class KeptEntry(Module):
    """A region together with the entry that its checkpoint keeps: `entry_bytes` of layer `number`."""

    def __init__(self, region: Module, config: ChainConfig, number: int) -> None:
        self.region = region
        self.config = config
        self.number = number
        self.path = region.path

    def forward(self, x: Tensor) -> Tensor:
        entry = call("chain_entry", x, self.config.entry_bytes[self.number])
        return self.region(entry)
