"""Writing profiles: YAML in a fixed order, label and source said once per group, so that changes are reviewable."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from calibration.fit.evidence import REPOSITORY, FamilyFit
from calibration.fit.given import GIVEN, given_figures, header
from sim.cost.figures import Figure
from sim.cost.profile import flatten, read_yaml

FOLDER = REPOSITORY / "sim" / "cost" / "profiles"
ORDER = ("link", "gemm", "attention", "memory", "collective", "inter_node", "p2p", "copy", "overlap", "single_source")
WIDTH = 120
Evidence = tuple[str, str, str, float | None]
Tree = dict[str, Any]


def profile_texts(results: list[FamilyFit], keep_others: bool = False) -> dict[str, str]:
    """Text of every profile: given figures, those of `results` over them; with `keep_others`, between the two what
    the committed file holds."""
    texts = {}
    for name in GIVEN:
        figures = given_figures(name)
        if keep_others and (FOLDER / f"{name}.yaml").exists():
            committed = read_yaml(f"profiles/{name}.yaml")
            groups = {key: value for key, value in committed.items() if key in ORDER}
            figures = dict(flatten(name, groups))
        for result in results:
            figures.update(result.figures.get(name, {}))
        texts[name] = as_yaml(header(name), figures)
    return texts


def write_figures(results: list[FamilyFit], keep_others: bool = False, folder: Path = FOLDER) -> None:
    """Write every profile; files of profiles that are no longer given are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = profile_texts(results, keep_others)
    for stale in folder.glob("*.yaml"):
        if stale.stem not in texts:
            stale.unlink()
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def as_yaml(head: dict[str, Any], figures: dict[str, Figure]) -> str:
    """A profile as YAML."""
    lines = ["# Written by calibration.fit; change the scripts or given.yaml there, not this file."]
    for key, value in head.items():
        lines.append(f"{key}: {json.dumps(value) if isinstance(value, str) else _inline(value)}")
    return "\n".join([*lines, *figure_lines(figures)]) + "\n"


def figure_lines(figures: dict[str, Figure], order: Sequence[str] = ORDER) -> list[str]:
    """The figures as nested groups of YAML, an empty line before each group."""
    tree: Tree = {}
    for name, figure in figures.items():
        *path, leaf = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = figure
    lines = []
    for group in order:
        if group in tree:
            lines += ["", f"{group}:", *_group(tree[group], 1, ("", "", "", None))]
    return lines


def _inline(value: Any) -> str:
    return json.dumps(value).replace('"', "") if isinstance(value, list | dict) else str(value)


def _group(node: Tree, depth: int, outer: Evidence) -> list[str]:
    """Lines of a group. Evidence that most figures of a group share is said once, at its head."""
    pad = "  " * depth
    leaves = {key: value for key, value in node.items() if isinstance(value, Figure)}
    shared = _shared(list(leaves.values()), outer)
    lines = [] if shared == outer else _evidence_lines(shared, pad)
    for key, figure in leaves.items():
        lines += _leaf(key, figure, pad, shared)
    for key, child in node.items():
        if not isinstance(child, Figure):
            lines += [f"{pad}{key}:", *_group(child, depth + 1, shared)]
    return lines


def _evidence(figure: Figure) -> Evidence:
    return figure.label, figure.source, figure.error, figure.sigma


def _shared(figures: list[Figure], outer: Evidence) -> Evidence:
    """The commonest evidence, if more than one figure has it."""
    commonest = Counter(map(_evidence, figures)).most_common(1)
    return commonest[0][0] if commonest and commonest[0][1] > 1 else outer


def _evidence_lines(evidence: Evidence, pad: str) -> list[str]:
    label, source, error, sigma = evidence
    lines = [f"{pad}label: {label}", *_text("source", source, pad)]
    if error:
        lines.append(f"{pad}error: {json.dumps(error)}")
    if sigma is not None:
        lines.append(f"{pad}sigma: {sigma:g}")
    return lines


def _leaf(key: str, figure: Figure, pad: str, shared: Evidence) -> list[str]:
    value = f"{figure.value:g}" if abs(figure.value) >= 1e-3 else str(figure.value)
    if _evidence(figure) == shared:
        return [f"{pad}{key}: {value}"]
    parts = [f"value: {value}", f"label: {figure.label}", f"source: {json.dumps(figure.source)}"]
    if figure.error:
        parts.append(f"error: {json.dumps(figure.error)}")
    if figure.sigma is not None:
        parts.append(f"sigma: {figure.sigma:g}")
    line = f"{pad}{key}: {{{', '.join(parts)}}}"
    if len(line) <= WIDTH:
        return [line]
    inner = pad + "  "
    return [f"{pad}{key}:", f"{inner}value: {value}", *_evidence_lines(_evidence(figure), inner)]


def _text(key: str, text: str, pad: str) -> list[str]:
    """A quoted string on one line, or folded."""
    line = f"{pad}{key}: {json.dumps(text)}"
    if len(line) <= WIDTH:
        return [line]
    return [f"{pad}{key}: >-", *(f"{pad}  {part}" for part in wrap(text, WIDTH - len(pad) - 2, break_on_hyphens=False))]
