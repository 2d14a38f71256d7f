"""How many memory events per second `CachingAllocator.play` does on the streams of recorded training steps.

    PYTHONPATH=. python benchmarks/allocator.py [FOLDER]

FOLDER holds recordings named train_*.json.gz (default: the ones that the tests use). The first step of each is played
once, its last step again and again. Speed is events per second of CPU time, best of three, one core.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

from sim.engine.allocator import AllocatorSettings, CachingAllocator
from sim.engine.allocator.statistics import Ints
from sim.program.program import Mem
from tests.exact import allocator_recordings as recordings

EVENTS = 1_000_000
Columns = tuple[Ints, Ints, Ints, Ints]


def steady(data: dict[str, list[object]]) -> tuple[Columns, Columns, int]:
    """Columns before the last step and of the last step (blocks that outlive it are freed), and handles used by it."""
    kind, handle, size, stream, _ = recordings.stream_of(data)
    marks = [
        index
        for index, event in enumerate(data["trace"])
        if event[0] == "mark" and event[1].endswith(("model", "zero"))
    ]
    before = {"trace": data["trace"][: marks[-2]]}
    start = len(recordings.stream_of(before)[0])
    first = int(handle[:start].max()) + 1
    step = slice(start, None)
    born = handle[step][kind[step] == Mem.ALLOC]
    died = handle[step][kind[step] == Mem.FREE]
    outlive = np.setdiff1d(born, died)
    keep = (kind[step] == Mem.ALLOC) | (handle[step] >= first)
    fill = np.zeros(len(outlive), np.int64)
    repeated = (
        np.concatenate([kind[step][keep], fill + Mem.FREE]),
        np.concatenate([handle[step][keep], outlive]),
        np.concatenate([size[step][keep], fill]),
        np.concatenate([stream[step][keep], fill]),
    )
    return (kind[:start], handle[:start], size[:start], stream[:start]), repeated, int(handle.max()) + 1 - first


def repeat(step: Columns, handles: int, times: int) -> Columns:
    """The same step `times` times, each with handles of its own."""
    kind, handle, size, stream = (np.tile(column, times) for column in step)
    return kind, handle + np.repeat(np.arange(times) * handles, len(step[0])), size, stream


def main() -> None:
    if len(sys.argv) > 1:
        os.environ["SIM_RECORDINGS"] = sys.argv[1]
    for name, path in recordings.find()["step"]:
        if not Path(name).name.startswith("train_"):
            continue
        data = recordings.load(path)
        before, step, handles = steady(data)
        columns = repeat(step, handles, EVENTS // len(step[0]))
        best = float("inf")
        for _ in range(3):
            settings = AllocatorSettings.parse(data["meta"]["settings"])
            allocator = CachingAllocator(settings, data["meta"]["capacity"])
            allocator.play(*before)
            start = time.process_time()
            result = allocator.play(*columns)
            best = min(best, time.process_time() - start)
            assert result.played == len(columns[0])
        print(f"{name:32} {len(columns[0]):>9,} events  {len(columns[0]) / best / 1e6:5.2f} million events/s")


if __name__ == "__main__":
    main()
