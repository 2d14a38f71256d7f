"""PyTorch's CUDA caching allocator, exactly: `CachingAllocator`, its settings, and the driver below it."""

from sim.engine.allocator.allocator import CachingAllocator
from sim.engine.allocator.blocks import Block, PrivatePool, StreamEvent
from sim.engine.allocator.driver import Driver
from sim.engine.allocator.layout import BlockLayout, SegmentLayout
from sim.engine.allocator.oom import OutOfMemory
from sim.engine.allocator.play import DriverCall, PlayResult
from sim.engine.allocator.statistics import Gauge, Statistics
from sim.scenario.allocator.parse import SettingsError, SettingsProblem
from sim.scenario.allocator.settings import AllocatorSettings

__all__ = [
    "AllocatorSettings",
    "Block",
    "BlockLayout",
    "CachingAllocator",
    "Driver",
    "DriverCall",
    "Gauge",
    "OutOfMemory",
    "PlayResult",
    "PrivatePool",
    "SegmentLayout",
    "SettingsError",
    "SettingsProblem",
    "Statistics",
    "StreamEvent",
]
