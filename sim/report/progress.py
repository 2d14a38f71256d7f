"""A progress bar on stderr for what takes longer than a second; nothing where nobody watches."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Self, TypeVar

PATIENCE_S = 1.0
T = TypeVar("T")


class Progress:
    """Counts what is past; the bar shows itself on a terminal after `PATIENCE_S`. It has a thread: fork before."""

    def __init__(self, total: int, doing: str = "playing strategies") -> None:
        self.total = total
        self.doing = doing
        self.finished = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._thread.start()
        return self

    def past(self, result: T) -> T:
        """Count one more; returns what it is given."""
        self.finished += 1
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _show(self) -> None:
        if self._over.wait(PATIENCE_S):
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn(self.doing), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=self.total)
            while not self._over.wait(0.1):
                bar.update(task, completed=self.finished)
