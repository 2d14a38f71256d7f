"""Level of detail: neighbours in time that belong together, as one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Columns = dict[str, npt.NDArray[Any]]


def merged_runs(columns: Columns, most: int) -> tuple[Columns, int]:
    """Rows of a stream that follow each other in one module and phase as one row with their `count`, if there are more
    than `most`; where that is still too many, the longest are kept. `name` is that of the first.

    columns: stream, start, end, name, path, phase (equal lengths). Returns the rows and how many were joined.
    """
    count = len(columns["start"])
    order = np.lexsort((columns["start"], columns["stream"]))
    sorted_columns = {name: column[order] for name, column in columns.items()}
    if count <= most:
        return sorted_columns | {"count": np.ones(count, np.int64)}, 0
    changes = np.zeros(count, bool)
    changes[0] = True
    for name in ("stream", "path", "phase"):
        changes[1:] |= sorted_columns[name][1:] != sorted_columns[name][:-1]
    first = np.flatnonzero(changes)
    last = np.append(first[1:], count) - 1
    runs = {name: column[first] for name, column in sorted_columns.items()}
    runs["end"] = np.maximum.reduceat(sorted_columns["end"], first)
    runs["count"] = last - first + 1
    if len(first) > most:
        longest = np.sort(np.argsort(runs["start"] - runs["end"], kind="stable")[:most])
        runs = {name: column[longest] for name, column in runs.items()}
    return runs, count
