"""Meta's HolisticTraceAnalysis reads the traces, and its breakdown and overlap are ours (pip install -e '.[hta]')."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sim.api import load, shown_lanes, simulate_setup
from sim.program.program import Row
from sim.timeline.lanes import Lanes, merged, overlap, total
from tests.unit.scenarios import PIPELINE, TINY, sim, write

analysis = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is an extra: .[hta]")
SCALES = {
    "fsdp": TINY.replace("llama-tiny", "llama-3.2-1b").replace("seq_len: 512", "seq_len: 2048"),
    "pipeline": PIPELINE.replace("gpt-tiny", "gpt2-medium")
    .replace("seq_len: 256", "seq_len: 1024")
    .replace("micro_batch: 1", "micro_batch: 8"),
}


def figures(lanes: Lanes) -> dict[str, float]:
    """As HTA counts: computing (kernels), busy otherwise, communicating under computing; of all steps, in ns."""
    moves = lanes.is_collective | np.isin(lanes.program.row_kind, (Row.SEND, Row.RECEIVE))
    shown = lanes.runs | moves
    everything = merged(lanes.start_ns[shown], lanes.end_ns[shown])
    computing = merged(lanes.start_ns[lanes.is_kernel], lanes.end_ns[lanes.is_kernel])
    communicating = merged(lanes.start_ns[moves], lanes.end_ns[moves])
    return {
        "kernels": total(everything),
        "compute": total(computing),
        "overlap": overlap(communicating, computing) / total(communicating),
    }


@pytest.mark.parametrize("name", SCALES)
def test_breakdown_and_overlap_are_ours(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")  # else every start and end becomes a whole microsecond
    scenario = write(tmp_path, SCALES[name], "mine.yaml")
    setup = load(scenario).strategies[0]
    assert sim("run", scenario, "--only", setup.name, "--every-rank", "--out", tmp_path).exit_code == 0
    folder = tmp_path / "mine" / setup.name / "ranks"
    found = analysis.TraceAnalysis(trace_dir=str(folder), include_last_profiler_step=True)
    breakdown = found.get_temporal_breakdown(visualize=False).set_index("rank")
    overlaps = found.get_comm_comp_overlap(visualize=False).set_index("rank")
    outcome = simulate_setup(setup)
    for number, lanes in enumerate(shown_lanes(outcome)):
        rank, ours = setup.mesh.rank({"pp": number}), figures(lanes)
        row = breakdown.loc[rank]
        assert row["compute_time(us)"] * 1e3 == pytest.approx(ours["compute"], rel=1e-4)
        busy = row["compute_time(us)"] + row["non_compute_time(us)"]
        assert busy * 1e3 == pytest.approx(ours["kernels"], rel=1e-4)
        assert overlaps.loc[rank]["comp_comm_overlap_pctg"] == pytest.approx(100 * ours["overlap"], abs=0.01)
