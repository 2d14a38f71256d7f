"""Every command block of every document works as written, and the documents belong together."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from sim.api import load, simulate_setup
from sim.checks.summary import explanations
from sim.checks.trace_diff import PARTS
from sim.program.program import OWNER_LABELS
from sim.report.console import TIME_COLUMNS, main_columns, memory_columns
from sim.report.offload import offload_columns
from sim.report.summary import AWAITING_STREAM, summarize
from sim.report.words import UNICODE
from sim.scenario import ScenarioError, load_text
from tests.unit.scenarios import ROOT

DOCS = ROOT / "docs"
NAVIGATION = YAML(typ="safe").load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
SOME_IS_LOST = 4
"""Exit code of `sim import` and `sim export` that says so; allowed there."""


def pages(navigation: list[dict[str, Any]]) -> list[Path]:
    found: list[Path] = []
    for entry in navigation:
        for below in entry.values():
            found += pages(below) if isinstance(below, list) else [DOCS / below]
    return found


PAGES = pages(NAVIGATION)
DOCUMENTS = [ROOT / "README.md", ROOT / "README.zh-CN.md", *PAGES]


def outside_fences(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def blocks(path: Path) -> list[str]:
    """Lines of indented blocks: commands, and nothing else."""
    return re.findall(r"^    (\S.*)$", outside_fences(path.read_text(encoding="utf-8")), re.M)


def fenced(kind: str) -> list[str]:
    return [
        text
        for path in PAGES
        for text in re.findall(rf"^```{kind}\n(.*?)^```$", path.read_text(encoding="utf-8"), re.M | re.S)
    ]


INSTALLS = re.compile(r"pip install .*? && (?=python)|^pip install .*")
"""What .ci/run does, in an environment of its own."""
COMMANDS = list(dict.fromkeys(INSTALLS.sub("", line) for path in DOCUMENTS for line in blocks(path)))
COMMANDS.remove("")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scenarios and what the documents tell to save, in which the commands run one after the other."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "scenarios", folder / "scenarios")
    for text in fenced("yaml"):
        if name := re.match(r"# (\w+\.yaml)\n", text):
            (folder / name[1]).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_works(command: str, checkout: Path) -> None:
    if "--device cuda" in command and shutil.which("nvidia-smi") is None:
        pytest.skip("measures a GPU, and there is none")
    if "calibrate" in command:
        pytest.importorskip("torch", reason="measures with torch")
    for name in dict.fromkeys(re.findall(r"out/(\w+)(?=/| |$)", command)):  # what the reader has typed by then
        if not (checkout / "out" / name).exists():
            call(f"python -m sim run scenarios/{name}.yaml", checkout)
    if "trace.json" in command.split():
        record(checkout)
    if "trace.json.gz" in command.split():
        call(f"{COMMANDS[0]} --only full", checkout)
        shutil.copy(checkout / "out" / "fsdp_ckpt" / "full" / "trace.json.gz", checkout)
    if "gpt3.yaml" in command.split() and "export" in command and not (checkout / "gpt3.yaml").exists():
        call(next(one for one in COMMANDS if one.endswith("--out gpt3.yaml")), checkout)
    result = call(command, checkout)
    allowed = {0, SOME_IS_LOST} if command.split()[3] in ("import", "export") else {0}
    assert result.returncode in allowed and "Traceback" not in result.stderr, result.stderr


def record(checkout: Path) -> None:
    """The Python block that records a trace, run as it stands."""
    pytest.importorskip("torch", reason="records a trace")
    (script,) = fenced("python")
    done = subprocess.run([sys.executable, "-c", script], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0 and (checkout / "trace.json").is_file(), done.stderr


def call(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = command.replace("python", sys.executable, 1)
    return subprocess.run(words, shell=True, cwd=folder, env=environment, capture_output=True, text=True)


def test_there_are_commands_of_every_kind_of_document() -> None:
    assert all(re.match(r"(python|torchrun .*) -m sim ", command) for command in COMMANDS), COMMANDS
    verbs = {command.split("-m sim ")[1].split()[0] for command in COMMANDS}
    assert verbs >= {"run", "compare", "diff", "explain", "export", "gpus", "import", "presets", "report", "schema"}
    assert all(blocks(path) for path in PAGES if path.parent.name == "guides")


def test_every_page_is_in_the_navigation() -> None:
    assert set(PAGES) == set(DOCS.rglob("*.md"))


def test_links_between_documents_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", outside_fences(path.read_text(encoding="utf-8"))):
            assert (path.parent / link).exists(), f"{path}: {link}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material")):
        pytest.skip("mkdocs-material is not installed: pip install -e '.[docs]'")
    words = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "guides" / "will-it-fit" / "index.html").is_file()


# -- metrics.md --------------------------------------------------------------------------------------------------------
METRICS = (DOCS / "metrics.md").read_text(encoding="utf-8")


def test_every_key_of_the_summary_has_an_entry() -> None:
    """Keys below labels, owners and the like vary; json.md lists all, and a test holds it to the summary."""
    keys = set(
        re.findall(r"^\| `([^`]+)` \|", (DOCS / "json.md").read_text(encoding="utf-8").split("# The tables")[0], re.M)
    )
    missing = [key for key in keys if not _has_entry(key.removesuffix("[]").removesuffix("{}"))]
    assert len(keys) > 90 and missing == []


def _has_entry(key: str) -> bool:
    name = key.rpartition(".")[0] if key.startswith("labels.") else key
    return any(f"`{start}" in METRICS for start in (f"{name}`", f"stages[].{name}`", f"{name}.", f"{name}[]"))


def test_every_column_of_the_screen_has_an_entry() -> None:
    played = (summarize(simulate_setup(load(ROOT / "scenarios" / "chain.yaml").strategies[0])),)
    columns = [
        *main_columns(played, UNICODE), *TIME_COLUMNS, *memory_columns(played, UNICODE), *offload_columns("red"),
    ]  # fmt: skip
    headings = {re.sub(r" (GiB|MiB|[\d.,]+ [GM]iB)$", "", column.heading) for column in columns}
    assert len(headings) > 25 and [name for name in headings if f"**{name}**" not in METRICS] == []


def test_the_parts_of_a_diff_and_the_causes_of_compare_have_entries() -> None:
    assert [name for name, _ in PARTS if f"*{name}*" not in METRICS] == []
    assert all(cause in METRICS for cause in ("network (", "PCIe (", "bubble (", "host ("))


def test_every_owner_and_label_has_an_entry() -> None:
    owners = METRICS.split("Owners:")[1].split("\n\n")[0]
    assert [label for label in OWNER_LABELS.values() if f"*{label}*" not in owners] == []
    assert f"*{AWAITING_STREAM}*" in owners
    labels = METRICS.split("## Labels")[1]
    known = ("exact", "close", "calibrated", "published", "datasheet", "assumed", "given")
    assert all(re.search(rf"^\|.*\b{label}\b.*\|", labels, re.M) for label in known)


# -- validation.md -----------------------------------------------------------------------------------------------------
def test_the_table_of_misses_says_what_the_summary_says() -> None:
    """sim/checks/explanations.yaml, word by word: change both."""
    lines = re.findall(r"^\| (\d\d_\w+) (?:\|[^|]*){4}\| ([^|]*) \|", (DOCS / "validation.md").read_text("utf-8"), re.M)
    known = explanations()
    assert len(lines) > 15
    assert [name for name, why in lines if why.strip() != known.get(name, "")] == []


# -- not-modelled.md ---------------------------------------------------------------------------------------------------
REFUSED = re.findall(
    r"^\| `(.*?)` \| (?:`(.*?)`)? ?\| (.*?) \|$", (DOCS / "not-modelled.md").read_text(encoding="utf-8"), re.M
)
SMALL = """
model: {preset: llama-tiny, implementation: torchtitan}
cluster: {gpu: h100, gpus_per_node: 1}
batch: {micro_batch: 1, seq_len: 512}
"""


@pytest.mark.parametrize(("setting", "beside", "why"), REFUSED)
def test_what_is_said_to_be_refused_is_refused_for_that_reason(setting: str, beside: str, why: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_text(SMALL, overrides=[text.replace(": ", "=", 1) for text in (setting, beside) if text])
    assert any(why in problem.message for problem in caught.value.problems)


def test_there_are_refusals() -> None:
    assert len(REFUSED) > 12
