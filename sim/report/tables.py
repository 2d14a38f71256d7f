"""Tables that break no word: what is too wide for the screen goes on in a second table with the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.table import Table
from rich.text import Text

from sim.report.summary import StrategySummary
from sim.report.words import NOTHING

LONGEST_NAME = 28
"""Longer names of rows are folded."""
WIDE = 24
"""Words get as much without a break."""
GAP = 2
"""Between columns: one of padding, one of the box."""

Cell = str | Text


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of every strategy under a heading."""

    heading: str
    cell: Callable[[StrategySummary], Cell]
    justify: Literal["left", "right"] = "right"


@dataclass(frozen=True, slots=True)
class Filled:
    """A column with its cells, one per row. Figures stay on one line, words (`justify` left) may take several."""

    heading: str
    cells: Sequence[Cell]
    justify: Literal["left", "right"] = "right"

    @property
    def natural(self) -> int:
        """Width without any break."""
        return max(len(self.heading), *(len(cell) for cell in self.cells))

    @property
    def least(self) -> int:
        """Width that breaks no word."""
        if self.justify == "right":
            return max(_longest_word(self.heading), *(len(cell) for cell in self.cells))
        return max(_longest_word(str(text)) for text in (self.heading, *self.cells))


def strategy_tables(
    heading: str,
    strategies: Sequence[StrategySummary],
    columns: Sequence[Column],
    width: int,
    names: Sequence[str] = (),
) -> list[Table]:
    """One row per strategy, by its name or another; a column without any figure is left out."""
    filled = [Filled(column.heading, [column.cell(s) for s in strategies], column.justify) for column in columns]
    shown = [column for column in filled if any(str(cell) != NOTHING for cell in column.cells)]
    return tables(Filled(heading, [Text(name) for name in names or [s.name for s in strategies]], "left"), shown, width)


def tables(rows: Filled, columns: Sequence[Filled], width: int) -> list[Table]:
    """The columns beside the names of the rows, in as many tables as `width` asks for; none without columns."""
    first = min(rows.natural, max(LONGEST_NAME, _longest_word(rows.heading)))
    return [_table(rows, first, group, width) for group in _groups(columns, width - first)]


def _groups(columns: Sequence[Filled], room: int) -> Iterator[list[Filled]]:
    """All columns where they fit, else neighbours without breaks of lines; a column that is too wide stands alone."""
    if sum(GAP + column.least for column in columns) <= room:
        yield from [list(columns)] if columns else []
        return
    group: list[Filled] = []
    taken = 0
    for column in columns:
        wanted = GAP + min(column.natural, max(column.least, WIDE))
        if group and taken + wanted > room:
            yield group
            group, taken = [], 0
        group.append(column)
        taken += wanted
    if group:
        yield group


def _table(rows: Filled, first: int, columns: Sequence[Filled], width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(rows.heading, style="bold", overflow="fold", width=first)
    spare = max(width - first - sum(GAP + column.least for column in columns), 0)
    for column in columns:
        more = min(column.natural - column.least, spare)
        spare -= more
        table.add_column(column.heading, justify=column.justify, overflow="fold", width=column.least + more)
    for cells in zip(rows.cells, *(column.cells for column in columns)):
        table.add_row(*cells)
    return table


def _longest_word(text: str) -> int:
    return max((len(word) for word in text.split()), default=0)
