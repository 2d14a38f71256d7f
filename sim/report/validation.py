"""`python -m sim validate`: published cases and tables of published runs, many at a time, under a progress bar."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from rich.markup import escape
from rich.table import Table as Screen

from sim.checks.published import CaseError, CheckResult, PlacedCase, good, packaged_cases, play_case, read_cases
from sim.checks.scoring import Score, score_row
from sim.checks.summary import FileSummary, markdown, summarize_file
from sim.checks.tables import Key, Row, Table, TableError, earlier_scores, read_table, write_scored
from sim.report.console import make_console
from sim.report.errors import RunError, cannot_write
from sim.report.progress import Progress
from sim.report.runner import can_fork, processors, workers_of
from sim.report.words import NOTHING

T = TypeVar("T")
A = TypeVar("A")

SAVE_EVERY_S = 5.0
ENDED = "a worker process was ended from outside; was the machine short of memory?"


@dataclass(frozen=True, slots=True)
class Scored:
    """What scoring a table came to: rows by status, and how many were there from an earlier run."""

    path: Path
    counts: dict[str, int]
    kept: int


def each(
    work: Callable[[A], T], items: Sequence[A], jobs: int | None, lost: Callable[[], T]
) -> Iterator[tuple[int, T]]:
    """(index, answer) of every item as it is ready, `jobs` processes at a time.

    An item that takes its process with it, as when the machine's memory ends, is tried once more alone; then it is
    answered by `lost`.
    """
    workers = min(len(items), jobs or processors())
    if workers < 2 or not can_fork():
        yield from ((index, work(item)) for index, item in enumerate(items))
        return
    waiting = dict(enumerate(items))
    for index, answer in _pooled(work, waiting, workers):
        del waiting[index]
        yield index, answer
    for index, item in waiting.items():
        yield index, next((answer for _, answer in _pooled(work, {index: item}, 1)), None) or lost()


def _pooled(work: Callable[[A], T], items: dict[int, A], workers: int) -> Iterator[tuple[int, T]]:
    """Answers until all are there or the pool breaks."""
    with workers_of(workers) as pool:
        indexes: dict[Future[T], int] = {pool.submit(work, item): index for index, item in dict(items).items()}
        for future in as_completed(indexes):
            try:
                answer = future.result()
            except BrokenProcessPool:
                continue
            yield indexes[future], answer


def read_all_cases(paths: Sequence[Path], only: Sequence[str]) -> list[PlacedCase]:
    """The cases in files, or those that come with sim. Raises RunError."""
    try:
        cases = [case for path in paths for case in read_cases(path)] if paths else packaged_cases()
    except CaseError as error:
        raise RunError(str(error)) from None
    known = [placed.case.id for placed in cases]
    for name in only:
        if name not in known:
            raise RunError(f"--only {name}: one of {', '.join(known)}")
    return [placed for placed in cases if not only or placed.case.id in only]


def play_cases(cases: Sequence[PlacedCase], jobs: int | None = None) -> list[CheckResult]:
    """The checks of all cases, in their order."""
    results: dict[int, list[CheckResult]] = {}
    answers = each(play_case, cases, jobs, list[CheckResult])
    first = next(answers, None)  # forks all workers; the bar's thread comes after
    if first is None:
        return []
    with Progress(len(cases), "playing cases") as progress:
        results[first[0]] = progress.past(first[1])
        for index, checks in answers:
            results[index] = progress.past(checks)
    lost = [cases[index].case.id for index in results if not results[index]]
    if lost:
        raise RunError(f"cases {', '.join(lost)}: {ENDED}")
    return [check for index in sorted(results) for check in results[index]]


def show_cases(paths: Sequence[Path], only: Sequence[str], jobs: int | None, as_json: bool) -> bool:
    """Play cases, verdicts on stdout. Did none miss its class? Raises RunError."""
    results = play_cases(read_all_cases(paths, only), jobs)
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=2, ensure_ascii=False))
        return good(results)
    console = make_console()
    console.print(case_table(results))
    for line in case_remarks(results):
        console.print(line, soft_wrap=True, markup=False)
    return good(results)


def case_table(results: Sequence[CheckResult]) -> Screen:
    """The checks as people read them."""
    table = Screen(box=None, padding=(0, 1, 0, 0))
    for title in ("case", "figure"):
        table.add_column(title, overflow="fold")
    for title in ("predicted", "published", "error"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("class", "verdict"):
        table.add_column(title, no_wrap=True)
    for result in results:
        ordering = result.kind == "ordering"
        predicted = NOTHING if result.predicted is None else f"{result.predicted:.5g}"
        table.add_row(
            result.case,
            escape(result.figure),
            ("holds" if result.predicted else "does not hold")
            if ordering and result.predicted is not None
            else predicted,
            NOTHING if result.published is None else f"{result.published:.5g}",
            NOTHING if result.error is None else f"{result.error:+.2%}".replace("%", " %"),
            result.kind,
            result.verdict,
        )
    return table


def case_remarks(results: Sequence[CheckResult]) -> list[str]:
    """Why figures miss, and the count."""
    lines = [f"{result.case}, {result.figure}: {result.reason}" for result in results if result.reason]
    counts = Counter(result.verdict for result in results)
    return [*lines, ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())]


def score_table(path: Path, out: Path, jobs: int | None = None, again: bool = False, limit_s: float = 600) -> Scored:
    """Score every row of a table into `out`, which is replaced in one go every few seconds and at the end.

    Rows that `out` holds as scored with the same inputs are kept, unless `again`. Raises RunError.
    """
    try:
        table = read_table(path)
        if out.resolve() == path.resolve():
            raise TableError(f"--out {out}: is the table itself; name another file")
        scores = {} if again else earlier_scores(out, table)
    except TableError as error:
        raise RunError(str(error)) from None
    keys = {table.key(row): row for row in table.rows}
    missing = [key for key in keys if key not in scores]
    kept = len(keys) - len(missing)
    _save(out, table, scores)
    answers = each(
        partial(score_row, limit_s=limit_s), [keys[key] for key in missing], jobs, partial(Score, {}, "failed", ENDED)
    )
    first = next(answers, None)  # forks all workers; the bar's thread comes after
    with Progress(len(missing), "scoring rows") as progress:
        saved = time.monotonic()
        while first is not None:
            index, score = progress.past(first)
            scores[missing[index]] = score.cells()
            if time.monotonic() - saved > SAVE_EVERY_S:
                _save(out, table, scores)
                saved = time.monotonic()
            first = next(answers, None)
    _save(out, table, scores)
    return Scored(out, Counter(scores[table.key(row)]["status"] for row in table.rows), kept)


def show_scored(
    path: Path | None, out: Path | None, jobs: int | None, again: bool, limit_s: float, as_json: bool
) -> None:
    """Score a table, what became of its rows on stdout. Raises RunError."""
    if path is None or out is None:
        raise RunError("--table and --out go together: what to score, and where the scores go")
    scored = score_table(path, out, jobs, again, limit_s)
    if as_json:
        print(json.dumps({"out": str(scored.path), "kept": scored.kept, **scored.counts}, indent=2))
        return
    counts = ", ".join(f"{count} {status}" for status, count in sorted(scored.counts.items())) or "no rows"
    print(f"{scored.path}: {counts}" + (f" ({scored.kept} from before)" if scored.kept else ""))


def _save(out: Path, table: Table, scores: dict[Key, Row]) -> None:
    try:
        write_scored(out, table, scores)
    except OSError as error:
        raise cannot_write(error, out) from None


def summarize_files(paths: Sequence[Path]) -> list[FileSummary]:
    """Summaries of scored tables; a folder stands for its CSV files. Raises RunError."""
    files = [file for path in paths for file in (sorted(path.glob("*.csv")) if path.is_dir() else [path])]
    if not files:
        raise RunError("--summary: no scored tables there")
    try:
        return [summarize_file(file) for file in files]
    except TableError as error:
        raise RunError(str(error)) from None


def show_summary(paths: Sequence[Path], as_json: bool) -> None:
    """Summaries of scored tables on stdout. Raises RunError."""
    summaries = summarize_files(paths)
    as_text = [asdict(summary) for summary in summaries]
    print(json.dumps(as_text, indent=2, ensure_ascii=False) if as_json else markdown(summaries))
