"""Tables of published runs: read a CSV, keep what an earlier scoring found, write atomically in the input's order."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sim.checks.facts import COLUMNS, NEEDED, VTRAIN_COLUMNS
from sim.checks.scoring import RESULTS

csv.field_size_limit(1 << 24)

Row = dict[str, str]
Key = tuple[str, ...]


class TableError(ValueError):
    """A file that is no table of training runs; the message names the file and says why."""


@dataclass(frozen=True, slots=True)
class Table:
    """`columns` in the file's order; every row has each of them."""

    path: Path
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    def key(self, row: Mapping[str, str]) -> Key:
        """What makes a row's score: its input columns."""
        return tuple(row.get(column, "") for column in self.columns if column not in RESULTS)


def read_table(path: Path) -> Table:
    """A CSV in the columns of the published measurements, or in vTrain's. Raises TableError, OSError."""
    table = _read(path)
    if VTRAIN_COLUMNS.keys() <= set(table.columns):
        return table
    missing = [column for column in NEEDED if column not in table.columns]
    if missing:
        known = sum(column in table.columns for column in COLUMNS)
        hint = "" if known > len(NEEDED) else " (docs/validation.md lists the columns)"
        raise TableError(f"{path}: no table of training runs: columns {', '.join(missing)} are missing{hint}")
    return table


def _read(path: Path) -> Table:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = list(csv.reader(file, strict=True))
    except UnicodeDecodeError:
        raise TableError(f"{path}: is not a text file (UTF-8 is expected)") from None
    except csv.Error as error:
        raise TableError(f"{path}: not CSV: {error}") from None
    lines = [line for line in lines if any(cell.strip() for cell in line)]
    if not lines:
        raise TableError(f"{path}: is empty: a line of column names is expected")
    columns = tuple(name.strip() for name in lines[0])
    repeated = sorted({name for name in columns if columns.count(name) > 1})
    if repeated:
        raise TableError(f"{path}: columns {', '.join(repeated)} are given twice")
    for number, line in enumerate(lines[1:], 2):
        if len(line) != len(columns):
            raise TableError(f"{path}: row {number} has {len(line)} cells, not {len(columns)}")
    return Table(path, columns, tuple(dict(zip(columns, line)) for line in lines[1:]))


def earlier_scores(path: Path, table: Table) -> dict[Key, Row]:
    """Scores of an earlier run in `path`, by a row's inputs; only those that need no second try.

    None where there is no such file. Raises TableError for a file that is no scored table of these columns.
    """
    if not path.exists():
        return {}
    old = _read(path)
    inputs = [column for column in table.columns if column not in RESULTS]
    if not set(RESULTS) <= set(old.columns) or not set(inputs) <= set(old.columns):
        raise TableError(f"{path}: is there already and holds no scores of these columns; name another --out")
    return {table.key(row): {name: row[name] for name in RESULTS} for row in old.rows if row["status"] == "scored"}


def write_scored(path: Path, table: Table, scores: Mapping[Key, Mapping[str, str]]) -> None:
    """The table's scored rows in its order, as one file that is replaced in one go."""
    columns = [column for column in table.columns if column not in RESULTS] + list(RESULTS)
    rows = [{**row, **scores[key]} for row in table.rows if (key := table.key(row)) in scores]
    write_rows(path, columns, rows)


def write_rows(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
