"""Any file becomes a scenario or a list of problems, never a traceback, and the written scenario is the resolved one."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.interop import TOOLS, ImportProblems, Options, import_file, scenario_text
from sim.interop.shell import read_script
from sim.interop.table import load_table
from sim.scenario import load_text
from tests.unit.imports import BASE, CONFIG, FSDP, GPT3, GPT22B, TITAN, ZERO3_OFFLOAD

EXAMPLES = int(os.environ.get("SIM_EXAMPLES", "100"))
FILES = [
    ("megatron", "run.sh", GPT3),
    ("megatron", "run.sh", GPT22B),
    ("megatron", "args.txt", BASE),
    ("deepspeed", "ds.json", ZERO3_OFFLOAD),
    ("accelerate", "fsdp.yaml", FSDP),
    ("torchtitan", "job.toml", TITAN),
    ("hf", "config.json", CONFIG),
]
PIECES = [
    "$",
    "${",
    "}",
    '"',
    "'",
    "(",
    ")",
    "\\\n",
    "\n",
    ";",
    "&&",
    "--",
    "if ",
    "fi\n",
    "=",
    "[",
    "]",
    "{",
    ": ",
    ",",
]
PIECES += [
    "auto",
    "-1",
    "0",
    "1e9",
    "true",
    "null",
    "$(",
    "`",
    "<<",
    "#",
    "done",
    " --fp8-format ",
    "\x00",
    "\ue000",
    "\x1b",
]
ARGUMENTS = sorted(load_table("megatron").fields)


def is_imported_or_told(tool: str, name: str, text: str, options: Options) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text, encoding="utf-8", errors="replace")
        try:
            found = import_file(tool, path, options)
        except ImportProblems as error:
            assert error.problems
            assert str(error).endswith("Nothing was imported.")
            return
        written = scenario_text(found, Path())
        assert load_text(written, found.scenario.name).strategies == found.scenario.strategies


def options_for(tool: str) -> Options:
    model = "llama-3.1-8b" if tool in ("deepspeed", "accelerate") else None
    return Options(gpu="h100", model=model, seq_len=None if tool in ("megatron", "torchtitan") else 1024)


@pytest.mark.parametrize("tool, name, text", FILES)
def test_the_written_scenario_is_the_resolved_one(tool: str, name: str, text: str) -> None:
    is_imported_or_told(tool, name, text, options_for(tool))


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data(), file=st.sampled_from(FILES))
def test_a_mutated_file_is_imported_or_told(data: st.DataObject, file: tuple[str, str, str]) -> None:
    tool, name, text = file
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = start + data.draw(st.sampled_from([0, 0, 1, 2, 10]))
        text = text[:start] + data.draw(st.text(max_size=3) | st.sampled_from(PIECES)) + text[end:]
    is_imported_or_told(tool, name, text, options_for(tool))


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    arguments=st.lists(
        st.tuples(st.sampled_from(ARGUMENTS), st.sampled_from(["", "0", "1", "2", "3", "8", "-1", "0.5", "none", "full"])),
        max_size=6,
    )
)  # fmt: skip
def test_any_arguments_are_imported_or_told(arguments: list[tuple[str, str]]) -> None:
    more = " ".join(f"--{name} {value}" for name, value in arguments)
    is_imported_or_told("megatron", "args.txt", f"{BASE} {more}", Options(gpu="h100"))


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    tool=st.sampled_from(sorted(TOOLS)), text=st.text(), suffix=st.sampled_from([".sh", ".yaml", ".json", ".toml", ""])
)
def test_any_text_is_imported_or_told(tool: str, text: str, suffix: str) -> None:
    is_imported_or_told(tool, f"file{suffix}", text, options_for(tool))


@settings(max_examples=EXAMPLES, deadline=None)
@given(text=st.lists(st.text(max_size=4) | st.sampled_from(PIECES), max_size=12).map("".join))
def test_any_script_is_read(text: str) -> None:
    read_script(text)
