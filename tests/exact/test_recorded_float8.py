"""torchao's Float8Linear run eagerly, recorded: every allocation at its address, every free, every mark.

Real runs of torchao 0.18 on torch 2.14.1 over a fake driver, scales per tensor, on one GPU (bf16, autocast) and under FSDP2.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exact.compare import compare_file

RECORDINGS = sorted((Path(__file__).parent / "recordings" / "float8").glob("*.json.gz"))


@pytest.mark.parametrize("path", RECORDINGS, ids=[path.name.removesuffix(".json.gz") for path in RECORDINGS])
def test_a_recording_is_equal_event_for_event(path: Path) -> None:
    assert compare_file(path.name, path).differences == ()


def test_recordings_exist() -> None:
    assert len(RECORDINGS) == 3
