"""The house's own rules: imports run one way, files stay small, formatter, linter and type checker agree."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    "units", "hardware", "model", "scenario", "program", "cost", "runtime", "timeline", "engine", "api", "plan",
    "checks", "interop", "report", "cli", "__main__",
)  # fmt: skip
LARGEST_FILE_LINES = 400


def sources() -> list[Path]:
    return sorted((ROOT / "sim").rglob("*.py"))


def room_of(path: Path) -> str:
    part = path.relative_to(ROOT / "sim").parts[0]
    return part.removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "sim" else [f"sim.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("sim.")}
    return rooms & set(ROOMS)


def test_a_room_imports_only_rooms_above_it() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {other}"
        for path in sources()
        if path.name != "__init__.py" or path.parent.name != "sim"
        for other in imported_rooms(path)
        if ROOMS.index(other) > ROOMS.index(room_of(path))
    ]
    assert wrong == []


def test_torch_is_imported_by_no_ordinary_run() -> None:
    code = "import sys, sim.api, sim.plan.micro_batch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_no_file_is_over_about_400_lines() -> None:
    files = [*sources(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "calibration").rglob("*.py")]
    long = {str(p.relative_to(ROOT)): n for p in files if (n := len(p.read_text().splitlines())) > LARGEST_FILE_LINES}
    assert long == {}


def test_nothing_names_a_machine_path() -> None:
    roots = ("sim", "tests", "docs", "scenarios", "calibration", "benchmarks", "notebooks")
    texts = [p for root in roots for p in (ROOT / root).rglob("*") if p.suffix in (".py", ".md", ".yaml", ".ipynb")]
    assert [str(p) for p in texts if "/" + "work/" in p.read_text()] == []


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "format", "--check", "."],
        ["ruff", "check", "."],
        ["mypy", "--strict", "-p", "sim"],
    ],
    ids=["format", "lint", "types"],
)
def test_the_tools_agree(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
