"""From a file to a document: YAML 1.2 with line numbers, `extends`, and --set overrides."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path as FilePath
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from sim.scenario.document import Document, Origin, Path, merged
from sim.scenario.problems import Problem, ScenarioError, dotted

OVERRIDES = "--set"
"""Stands for the file of values that came from the command line."""

LARGEST_DOCUMENT = 20_000
"""Values in one file; a few aliases of aliases could otherwise fill the memory."""

SCALAR_TAG = "tag:yaml.org,2002:"
COLLECTION_TAGS = (f"{SCALAR_TAG}map", f"{SCALAR_TAG}seq")


def load_document(path: FilePath, overrides: Iterable[str] = ()) -> Document:
    """The scenario in a file, with what it extends below it and `path=value` overrides on top.

    Raises ScenarioError where there is nothing to check: no such file, a directory, not YAML.
    """
    return overridden(
        _extended(read_document(read_text(path), str(path)), path.parent, (os.path.abspath(path),)), overrides
    )


def load_text_document(text: str, name: str, overrides: Iterable[str] = ()) -> Document:
    """As load_document, from text; `name` stands for the file, `extends` starts at the working directory."""
    return overridden(_extended(read_document(text, name), FilePath(), ()), overrides)


def beside(origin: Origin, name: str) -> FilePath:
    """A file that a value names: relative to the file that says it, to the working directory from --set."""
    folder = FilePath() if origin.file == OVERRIDES else FilePath(origin.file).parent
    return folder / os.path.expanduser(name)


def read_document(text: str, file: str) -> Document:
    """One YAML text, nothing resolved. Raises ScenarioError for text that is no YAML or holds no mapping."""
    root = _compose(text, file)
    if root is None:
        raise ScenarioError([Problem(file=file, message="is empty: a scenario has at least a model")])
    if not isinstance(root, MappingNode):
        message = "sections are expected, e.g. model: {preset: llama-3.1-8b}"
        raise ScenarioError([Problem(file=file, line=root.start_mark.line + 1, message=message)])
    reader = _Reader(file)
    data = reader.value(root, ())
    return Document(data, reader.origins | {(): Origin(file, None, ())}, reader.problems)


def read_text(path: FilePath) -> str:
    """The text of a file. Raises ScenarioError for what is none."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        message = "is not a text file (UTF-8 is expected)"
    except OSError as error:
        message = "is a directory: a file is expected" if path.is_dir() else (error.strerror or "unreadable").lower()
    except ValueError:
        message = "is no name of a file"
    raise ScenarioError([Problem(file=str(path), message=message)])


def _compose(text: str, file: str) -> Node | None:
    """The node tree. ruamel reports some malformed text by errors of other kinds than its own."""
    try:
        node: Node | None = YAML(typ="safe", pure=True).compose(text)
        return node
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        message = " ".join(str(part).strip() for part in (error.context, error.problem) if part)
    except Exception as error:
        line, message = None, " ".join(str(error).split())[:120]
    raise ScenarioError([Problem(file=file, line=line, message=f"not YAML: {message or 'it cannot be read'}")])


class _Reader:
    """Walks a node tree into plain values; notes where each key stands, and keys that are written twice."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.origins: dict[Path, Origin] = {}
        self.problems: list[Problem] = []
        self.constructor = YAML(typ="safe", pure=True).constructor
        self.open: list[Node] = []
        self.count = 0

    def value(self, node: Node, path: Path) -> Any:
        self.count += 1
        if node in self.open or self.count > LARGEST_DOCUMENT:
            what = "contains itself" if node in self.open else f"more than {LARGEST_DOCUMENT:,} values"
            raise ScenarioError([Problem(file=self.file, line=_line(node), path=dotted(path), message=what)])
        self.open.append(node)
        try:
            if not isinstance(node, ScalarNode) and node.tag not in COLLECTION_TAGS:
                self.problem(_line(node), path, f"the tag {node.tag} means nothing here")
            if isinstance(node, MappingNode):
                return self.mapping(node, path)
            if isinstance(node, SequenceNode):
                return [self.item(item, (*path, index)) for index, item in enumerate(node.value)]
            return self.scalar(node, path)
        finally:
            self.open.pop()

    def mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        lines: dict[str, int] = {}
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = _line(key_node)
            if not isinstance(key_node, ScalarNode):
                self.problem(line, path, "a name is expected before the colon")
                continue
            key = str(key_node.value)
            if key in lines:
                self.problem(line, (*path, key), f"is given twice, first in line {lines[key]}")
                continue
            lines[key] = line
            self.origins[(*path, key)] = Origin(self.file, line, (*path, key))
            data[key] = self.value(value_node, (*path, key))
        return data

    def item(self, node: Node, path: Path) -> Any:
        self.origins[path] = Origin(self.file, _line(node), path)
        return self.value(node, path)

    def scalar(self, node: Node, path: Path) -> Any:
        kind = str(node.tag).removeprefix(SCALAR_TAG)
        construct: dict[str, Callable[[Node], Any]] = {
            "null": self.constructor.construct_yaml_null,
            "bool": self.constructor.construct_yaml_bool,
            "int": self.constructor.construct_yaml_int,
            "float": self.constructor.construct_yaml_float,
            "str": lambda node: node.value,
            "timestamp": lambda node: node.value,
        }
        if kind not in construct:
            self.problem(_line(node), path, f"the tag {node.tag} means nothing here")
            return node.value
        try:
            return construct[kind](node)
        except Exception:  # "!!int abc", a number of 5,000 digits: ruamel lets Python's own errors through
            self.problem(_line(node), path, f"cannot be read as {kind}")
            return node.value

    def problem(self, line: int, path: Path, message: str) -> None:
        self.problems.append(Problem(file=self.file, line=line, path=dotted(path), message=message))


def _line(node: Node) -> int:
    line: int = node.start_mark.line
    return line + 1


def _extended(document: Document, folder: FilePath, chain: tuple[str, ...]) -> Document:
    """The document over the one that its `extends` names, if any; `chain` holds the files that lead here."""
    base_name = document.data.get("extends")
    if base_name is None:
        return document
    if not isinstance(base_name, str):
        document.problem(("extends",), "the path of a scenario file is expected")
        return document
    base_path = folder / os.path.expanduser(base_name)
    if os.path.abspath(base_path) in chain:
        document.problem(("extends",), "leads back to itself")
        return document
    try:
        base = read_document(read_text(base_path), str(base_path))
        base = _extended(base, base_path.parent, (*chain, os.path.abspath(base_path)))
    except ScenarioError as error:
        if any(problem.line is not None for problem in error.problems):
            document.problems.extend(error.problems)
        else:
            document.problem(("extends",), error.problems[0].text)
        return document
    return merged(base, document)


def overridden(document: Document, overrides: Iterable[str]) -> Document:
    """Overrides are applied in order; the last one wins."""
    for override in overrides:
        dotted_path, equals, text = override.partition("=")
        path = tuple(dotted_path.strip().split("."))
        if not equals or not all(path) or path[0] == "extends":
            message = "path=value is expected, e.g. batch.seq_len=8192"
            document.problems.append(Problem(file=OVERRIDES, path=override, message=message))
            continue
        try:
            document = merged(document, _override(path, text))
        except ScenarioError as error:
            document.problems.extend(
                Problem(file=OVERRIDES, path=dotted(path), message=problem.text) for problem in error.problems
            )
    return document


def _override(path: tuple[str, ...], text: str) -> Document:
    """A document of one value; the value is YAML: 8192, true, null, [attention], {every: 2}, text."""
    node = _compose(text, OVERRIDES)
    reader = _Reader(OVERRIDES)
    value = None if node is None else reader.value(node, path)
    places: list[Path] = [path[:length] for length in range(len(path) + 1)]
    origins = {place: Origin(OVERRIDES, None, place) for place in [*places, *reader.origins]}
    data = {path[-1]: value}
    for part in reversed(path[:-1]):
        data = {part: data}
    return Document(data, origins, [_without_line(problem) for problem in reader.problems])


def _without_line(problem: Problem) -> Problem:
    return Problem(file=problem.file, path=problem.path, message=problem.message)
