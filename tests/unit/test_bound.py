"""What bounds a step: one small case per cause."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.text import Text

from sim.api import load, simulate_setup
from sim.report.bound import bound_by, waits_s
from sim.report.compare import coloured
from sim.report.console import BAD, GOOD
from sim.report.summary import StrategySummary, summarize
from tests.unit.scenarios import CHAIN, PIPELINE, TIGHT, TINY, write

STAGES = PIPELINE.replace("preset: gpt-tiny", "preset: gpt2-medium").replace("seq_len: 256", "seq_len: 1024")
LARGE = TINY.replace("preset: llama-tiny", "preset: llama-3.2-1b").replace("seq_len: 512", "seq_len: 8192")


def played(folder: Path, text: str, strategy: int = 0, *overrides: str) -> StrategySummary:
    return summarize(simulate_setup(load(write(folder, text), overrides).strategies[strategy]), None)


@pytest.mark.parametrize(
    ("text", "strategy", "overrides", "cause"),
    [
        (LARGE, 0, (), "compute"),
        (TINY, 0, (), "host"),
        (STAGES, 0, (), "bubble"),
        (CHAIN, 0, (TIGHT,), "memory in "),
        (LARGE, 0, ("offload={what: activations, streams: side}",), "PCIe"),
        (LARGE.replace("gpus_per_node: 2", "gpus_per_node: 1, nodes: 2, network: 10 Gb/s"), 0, (), "network"),
    ],
)
def test_each_cause_is_named(tmp_path: Path, text: str, strategy: int, overrides: tuple[str, ...], cause: str) -> None:
    assert bound_by(played(tmp_path, text, strategy, *overrides)).startswith(cause)


def test_waits_are_shorter_than_the_step(tmp_path: Path) -> None:
    for text in (TINY, PIPELINE, CHAIN):
        s = played(tmp_path, text)
        assert s.step_time_s is not None
        assert all(0 <= wait <= s.step_time_s for wait in waits_s(s).values())


def test_changes_are_green_for_the_better_and_red_for_the_worse() -> None:
    def style(change: float, less_is_good: bool) -> str:
        return str(coloured("1", "x", change, less_is_good).spans[0].style)

    assert (style(-1, True), style(1, True)) == (GOOD, BAD)
    assert (style(-1, False), style(1, False)) == (BAD, GOOD)
    assert coloured("1", "+0", 0, True) == Text("1 +0")
