"""The page's data says what the timelines say; its size stays small; its explorers are simulations."""

from __future__ import annotations

import base64
import gzip
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.api import load, simulate_setup
from sim.report.page.data import Shown, strategy_data
from sim.report.page.explorers import EXPLORERS, FILE
from sim.report.page.level import merged_runs
from sim.report.page.write import write_page
from sim.report.summary import summarize
from sim.timeline.clock import step_windows
from tests.unit.scenarios import CHAIN, PIPELINE, ROOT, TIGHT, TINY, sim, write

MIB = 1 << 20
LARGEST_PAGE_BYTES = 8_000_000


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    setup = load(write(tmp_path_factory.mktemp("page"), TINY)).strategies[1]
    outcome = simulate_setup(setup)
    return Shown.of(outcome, summarize(outcome, None))


@pytest.fixture(scope="module")
def data(shown: Shown) -> dict[str, Any]:
    return strategy_data(shown, None)


def page_data(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/gzip" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    loaded: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found[1])))
    return loaded


def test_the_stack_at_the_peak_is_the_peak(shown: Shown, data: dict[str, Any]) -> None:
    """All storages are there in a small run: those alive at any event's instant sum to what is allocated."""
    assert not data["detail"]
    peak = shown.picture.peak_ms
    alive = sum(size for start, end, size, *_ in data["storages"]["rows"] if start <= round(peak, 4) < end)
    assert alive == pytest.approx(shown.picture.peak_bytes / MIB, rel=0.02)  # several events fall on one instant


def test_the_curve_has_the_exact_peak(shown: Shown, data: dict[str, Any]) -> None:
    totals = np.sum(list(data["curve"]["owners"].values()), axis=0)
    assert totals.max() == pytest.approx(shown.outcome.peak.bytes / MIB, abs=0.1 * len(data["curve"]["owners"]))


def test_kernels_are_those_of_the_step(shown: Shown, data: dict[str, Any]) -> None:
    lanes = shown.lanes
    rows = data["kernels"]["rows"]
    assert all(0 <= lane < len(data["kernels"]["lanes"]) for lane, *_ in rows)
    busy = sum(row[2] for row in rows if data["kernels"]["lanes"][row[0]] == "compute")
    begin_ns, end_ns = step_windows(lanes)[-1]
    inside = lanes.computes & (lanes.end_ns > begin_ns) & (lanes.start_ns < end_ns)
    expected = float((lanes.end_ns[inside] - lanes.start_ns[inside]).sum()) * 1e-6
    assert busy == pytest.approx(expected, abs=1e-4 * len(rows))  # the page rounds to 0.1 us


def test_many_kernels_are_joined_without_losing_time() -> None:
    count = 1000
    start = np.arange(count, dtype=float)
    columns = {
        "stream": np.zeros(count, np.int64), "start": start, "end": start + 0.5, "name": np.arange(count),
        "path": np.arange(count) // 100, "phase": np.ones(count, np.int64),
    }  # fmt: skip
    runs, joined = merged_runs(columns, 50)
    assert joined == count and runs["count"].sum() == count
    assert runs["start"].tolist() == [0.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0, 900.0]
    assert runs["end"].tolist() == [value + 99.5 for value in runs["start"].tolist()]
    assert len(merged_runs(columns, 5)[0]["start"]) == 5
    assert merged_runs(columns, count)[1] == 0


@pytest.mark.parametrize(("text", "overrides"), [(TINY, ()), (PIPELINE, ()), (CHAIN, (TIGHT,))])
def test_a_page_is_whole_small_and_asks_no_network(tmp_path: Path, text: str, overrides: tuple[str, ...]) -> None:
    file = write(tmp_path, load(write(tmp_path, text), overrides).text, "whole.yaml")
    path = write_page(file, tmp_path / "out")
    page = path.read_text(encoding="utf-8")
    assert path.stat().st_size < LARGEST_PAGE_BYTES
    head, body = page.split("</head>")
    assert "{{" not in body and not re.search(r'(src|href)="', body + head.split("<script>")[0])
    loaded = page_data(page)
    assert [s["name"] for s in loaded["strategies"]] == [setup.name for setup in load(file).strategies]
    assert loaded["scenario"] == load(file).text


def test_what_is_left_out_is_told(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = strategy_data(shown, None)
    monkeypatch.setattr("sim.report.page.data.MOST_STORAGES", 10)
    monkeypatch.setattr("sim.report.page.data.MOST_KERNELS", 7)
    cut = strategy_data(shown, None)
    storages, kernels = len(whole["storages"]["rows"]), len(whole["kernels"]["rows"])
    assert (len(cut["storages"]["rows"]), cut["leftOut"], whole["leftOut"]) == (10, storages - 10, 0)
    sizes = sorted((row[2] for row in whole["storages"]["rows"]), reverse=True)
    assert sorted((row[2] for row in cut["storages"]["rows"]), reverse=True) == sizes[:10]
    joined = sum(row[5] for row in cut["kernels"]["rows"])
    assert cut["detail"] == [
        f"The stack lists the 10 largest of {storages:,} storages; the others are one grey block.",
        f"Under the cursor, {joined:,} of {kernels:,} kernels are shown, joined to 7 runs of one module; the shortest are"
        " left out.",
    ]


def test_a_name_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    text = CHAIN.replace("by-two:", "'</script><b>':").replace("model:", "description: </script><i>x\nmodel:", 1)
    page = write_page(write(tmp_path, text), tmp_path).read_text(encoding="utf-8")
    assert "</script><b>" not in page and "</script><i>" not in page
    assert "</script><b>" in str(page_data(page)["table"])


def test_the_verb_writes_a_page_of_a_run_and_answers_what_is_wrong(tmp_path: Path) -> None:
    assert sim("run", write(tmp_path, CHAIN, "chain.yaml"), "--out", tmp_path).exit_code == 0
    result = sim("report", tmp_path / "chain", "--html", "--out", tmp_path)
    assert result.exit_code == 0 and (tmp_path / "chain.html").is_file()
    (tmp_path / "empty").mkdir()
    assert "folder of a run is expected" in sim("report", tmp_path / "empty").stderr
    many = "\n".join(f"  s{number}: {{}}" for number in range(11))
    crowded = write(tmp_path, CHAIN.split("strategies:")[0] + "strategies:\n" + many, "many.yaml")
    assert "choose with --only" in sim("report", crowded, "--out", tmp_path).stderr


# -- explorers -------------------------------------------------------------------------------------------------------
STORED = {explorer["id"]: explorer for explorer in json.loads(FILE.read_text(encoding="utf-8"))["explorers"]}


@pytest.mark.parametrize("explorer", EXPLORERS, ids=lambda explorer: explorer["id"])
def test_a_stored_point_is_what_the_simulation_says_today(explorer: dict[str, Any]) -> None:
    stored = STORED[explorer["id"]]
    assert {key: value for key, value in explorer.items() if key != "point"} == {
        key: value for key, value in stored.items() if key != "points"
    }
    every = list(product(*(axis["values"] for axis in explorer["axes"])))
    assert len(every) == len(stored["points"])
    chosen = every[len(every) // 2]
    found = explorer["point"](*chosen)
    assert stored["points"][every.index(chosen)] == (None if found is None else list(found))


def test_the_explorers_show_what_the_textbook_says() -> None:
    """Square root of n; the bubble of 1F1B falls with m; more recomputation, less memory."""
    chain = STORED["segments"]
    peaks = {
        values: point[0]
        for values, point in zip(product(*(axis["values"] for axis in chain["axes"])), chain["points"])
        if point is not None
    }
    assert min((peaks[k, 64], k) for k in (1, 2, 4, 8, 16, 32, 64))[1] in (2, 4)  # sqrt(64 entries / 8 per activation)
    pipeline = STORED["pipeline"]
    bubbles = dict(zip(product(*(axis["values"] for axis in pipeline["axes"])), pipeline["points"]))
    for stages in (2, 4, 8):
        falling = [bubbles[m, stages, "nothing"][0] for m in (2, 4, 8, 16, 32) if bubbles[m, stages, "nothing"]]
        assert falling == sorted(falling, reverse=True)


def test_plotly_is_imported_by_no_ordinary_run() -> None:
    assert "plotly" not in (ROOT / "sim/report/runner.py").read_text(encoding="utf-8")
