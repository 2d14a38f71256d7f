"""The field reference says what the schema says, and docs/fields.md is that reference."""

from __future__ import annotations

import re

import pytest

from sim.scenario import field_reference, is_field, section_names
from sim.scenario.reference import TOP
from tests.unit.scenarios import ROOT, sim

PAGE = (ROOT / "docs" / "fields.md").read_text(encoding="utf-8")


def test_the_page_is_the_one_that_the_schema_makes() -> None:
    assert field_reference() == PAGE, "python -m sim fields --markdown > docs/fields.md"


def test_every_field_of_the_page_is_one_and_has_a_meaning() -> None:
    sections = dict(zip(re.findall(r"^## (.*)$", PAGE, re.M), re.split(r"^## .*$", PAGE, flags=re.M)[1:]))
    assert list(sections) == section_names()
    count = 0
    for name, table in sections.items():
        for field, value, meaning in re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", table, re.M):
            path = field if name == TOP else f"{name}.{field}"
            assert name == "checkpoint.layers" or is_field(path)
            assert value and len(meaning) > 10, path
            count += 1
    assert count > 150


def test_links_lead_to_sections() -> None:
    anchors = {name.replace(".", "") for name in section_names()}
    links = set(re.findall(r"\(#([^)]+)\)", PAGE))
    assert len(links) > 15 and links <= anchors


def test_values_and_defaults_are_those_of_the_schema() -> None:
    rows = {line.split("`")[1]: line for line in field_reference("optimizer").splitlines() if line.startswith("| `")}
    assert "| `adamw`, `adamw-8bit` or `sgd` |" in rows["name"]
    assert "| number above 0 or `null` |" in rows["clip_norm"] and "Default: 1.0" in rows["clip_norm"]
    batch = field_reference("batch")
    assert "whole number from 1, *required*" in batch and "Default: 0" not in batch


def test_the_verb_shows_a_section_and_answers_a_wrong_one() -> None:
    assert sim("fields", "--markdown").stdout == PAGE
    shown = sim("fields", "parallel.fsdp").stdout
    assert "reshard_after_forward" in shown and "seq_len" not in shown
    wrong = sim("fields", "paralel")
    assert wrong.exit_code == 2 and "did you mean parallel?" in wrong.stderr
    with pytest.raises(KeyError):
        field_reference("nothing")
