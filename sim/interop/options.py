"""What the person who imports a file adds to it: what it runs on, and anything that the file cannot know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sim.scenario.document import Document, Origin
from sim.scenario.document import Path as DocumentPath
from sim.scenario.load import overridden

SHORT = {
    "gpu": ("cluster", "gpu"),
    "gpus_per_node": ("cluster", "gpus_per_node"),
    "nodes": ("cluster", "nodes"),
    "seq_len": ("batch", "seq_len"),
    "micro_batch": ("batch", "micro_batch"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`model`: a preset or the path of a Hugging Face config.json; `variables`: a script's environment; `changes`:
    path=value as for `sim run --set`."""

    gpu: str | None = None
    gpus_per_node: int | None = None
    nodes: int | None = None
    model: str | None = None
    seq_len: int | None = None
    micro_batch: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[str, ...] = ()

    def document(self, file: str) -> Document:
        """The sections that the options say, to lie over the file's."""
        data: dict[str, Any] = {}
        origins: dict[DocumentPath, Origin] = {(): Origin(file, None, ())}
        for path, option, value in self._short():
            data.setdefault(path[0], {})[path[1]] = value
            origins[path] = Origin(file, None, (option,))
            origins.setdefault(path[:1], Origin(file, None, path[:1]))
        return overridden(Document(data, origins), self.changes)

    def said(self) -> list[tuple[tuple[str, ...], str]]:
        """Paths of the scenario and the options that say them."""
        short = [(path, option) for path, option, _ in self._short()]
        changed = [(tuple(change.partition("=")[0].strip().split(".")), "--set") for change in self.changes]
        return short + changed

    def _short(self) -> Iterator[tuple[tuple[str, str], str, Any]]:
        for name, path in SHORT.items():
            if (value := getattr(self, name)) is not None:
                yield path, "--" + name.replace("_", "-"), value
        if self.model is not None:
            is_file = self.model.endswith(".json") or Path(self.model).is_file()
            yield (
                ("model", "config" if is_file else "preset"),
                "--model",
                (str(Path(self.model).absolute()) if is_file else self.model),
            )
