"""The labs run as a student runs them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest

from tests.unit.scenarios import ROOT

LABS = ROOT / "notebooks" / "labs"


def lab(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, LABS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)


def test_the_chain_keeps_13_arrays_or_8_and_passes() -> None:
    result = call("notebooks/labs/lab.py", "--layers", "12", "--segment", "3")
    assert result.returncode == 0
    for line in ("keeping everything: 13 arrays", "segments of 3: 8 arrays", "12 layers recomputed", "PASS"):
        assert line in result.stdout


@pytest.mark.parametrize(("segment", "alive"), [(1, 14), (3, 8), (4, 8), (12, 14)])
def test_live_arrays_by_segment(segment: int, alive: int) -> None:
    module = lab("lab")
    weights = [module.np.eye(module.WIDTH) for _ in range(12)]
    x = module.np.ones((module.ROWS, module.WIDTH))
    assert module.in_segments(weights, x, segment)[2] == alive


@pytest.mark.parametrize(("layers", "segment"), [(1, 1), (5, 2), (7, 7), (10, 4)])
def test_uneven_chains_pass_too(layers: int, segment: int) -> None:
    assert all(holds for _, holds in lab("lab").check(layers, segment))


@pytest.mark.parametrize("words", [("--segment", "0"), ("--segment", "13"), ("--layers", "0")])
def test_a_wrong_segment_is_answered(words: tuple[str, ...]) -> None:
    result = call("notebooks/labs/lab.py", *words)
    assert result.returncode == 2 and "Traceback" not in result.stderr


def test_every_lesson_of_torch_holds() -> None:
    pytest.importorskip("torch", reason="compares with PyTorch")
    result = call("notebooks/labs/torch_example.py")
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "PASS"), result.stdout
    assert "FAIL" not in result.stdout and result.stdout.count("ok  ") == 8
