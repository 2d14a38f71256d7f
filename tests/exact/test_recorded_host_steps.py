"""AdamW on the CPU beside parameters on the GPU, recorded: every allocation at its address, every free, every mark.

Real runs of torch 2.14.1 over a fake driver, with an optimizer that does what torchao's CPUOffloadOptimizer does. Not
shipped but equal too: states alone in bf16, and under autocast with full checkpointing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.program.program import Row
from sim.runtime.host_adamw import SMALLEST
from sim.runtime.record import record
from tests.exact.allocator_recordings import load
from tests.exact.compare import compare_file
from tests.exact.recorded_setup import llama_setup

RECORDINGS = sorted((Path(__file__).parent / "recordings" / "host_steps").glob("*.json.gz"))
IDS = [path.name.removesuffix(".json.gz") for path in RECORDINGS]


@pytest.mark.parametrize("path", RECORDINGS, ids=IDS)
def test_a_recording_is_equal_event_for_event(path: Path) -> None:
    assert compare_file(path.name, path).differences == ()


@pytest.mark.parametrize("path", RECORDINGS, ids=IDS)
def test_every_large_parameter_has_a_pinned_copy_and_a_pinned_gradient(path: Path) -> None:
    """The recording device counts pinned blocks from 64 KiB on; moments are pageable."""
    meta = load(path)["meta"]
    program = record(llama_setup(meta), steps=1)
    first = int(program.row_kind.tolist().index(Row.LAUNCH))
    copies = [program.copies[n].bytes for n in program.row_argument[:first][program.row_kind[:first] == Row.COPY]]
    blocks = [1 << (size - 1).bit_length() for size in copies]
    assert meta["pinned_peak"] == 2 * sum(block for block in blocks if block >= 64 << 10)
    item_bytes = 2 if meta["prec"] == "bf16" else 4
    assert min(copies) >= SMALLEST * item_bytes
    assert program.host_bytes.max() == 2 * sum(blocks) + 2 * sum(copies)
