"""Every notebook runs from top to bottom, without a GPU and without network; `pytest --nbmake notebooks` does the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.scenarios import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LARGEST_BYTES = 120_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="notebooks are an extra of the tests")
    client = pytest.importorskip("nbclient", reason="notebooks are an extra of the tests")
    book = nbformat.read(path, as_version=4)
    client.NotebookClient(
        book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    ).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_keeps_light_outputs(path: Path) -> None:
    assert path.stat().st_size < LARGEST_BYTES
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert any(cell["outputs"] for cell in code), "run it once before committing"
    assert not [output for cell in code for output in cell["outputs"] if output["output_type"] == "error"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_an_exercise_with_a_collapsed_solution_that_asserts(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert any("**Exercise" in "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    solutions = [cell for cell in cells if "solution" in cell["metadata"].get("tags", ())]
    assert solutions and all(cell["metadata"]["jupyter"]["source_hidden"] for cell in solutions)
    assert all("assert " in "".join(cell["source"]) and cell["outputs"] for cell in solutions)


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) >= 14
