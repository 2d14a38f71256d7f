"""What has been measured so far, a JSON object per line: an interruption loses nothing, and the next run goes on."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

Samples = dict[str, list[float]]


class Kept:
    """Samples in ns (or other figures) by key. `path` None: in memory alone."""

    def __init__(self, path: Path | None, machine: dict[str, object]) -> None:
        """Raises ValueError where the file was written on another machine, or is none of these."""
        self.path = path
        self.samples: Samples = defaultdict(list)
        if path is None:
            return
        if path.exists() and path.stat().st_size:
            self._read(path, machine)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"machine": machine}) + "\n", encoding="utf-8")

    def _read(self, path: Path, machine: dict[str, object]) -> None:
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]  # a line that an interruption cut short is dropped
        try:
            first, *lines = [json.loads(line) for line in whole.splitlines()]
            if first["machine"] != machine:
                raise ValueError(f"{path} holds measurements of another machine or setting: name another file")
            for line in lines:
                for key, values in line.items():
                    self.samples[key].extend(values)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no file of the check's measurements: name another file") from error
        if whole != text:
            path.write_text(whole, encoding="utf-8")

    def add(self, found: Samples) -> None:
        """One round: on disk at once."""
        for key, values in found.items():
            self.samples[key].extend(values)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
