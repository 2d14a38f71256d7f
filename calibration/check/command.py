"""The check as a command: python -m calibration.check [--short] [--minutes 5] [--json] [--strict] [--keep FILE].

Exit code: 0 where bytes are equal (with --strict: and times within the targets), 1 where they are not, 2 for wrong
input, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from calibration.check.loop import Request, Tell, check_cpu
from calibration.check.outcome import Outcome
from calibration.check.processes import check_scenario
from calibration.check.table import show
from calibration.measure.words import CalibrationError

MISMATCH, WRONG_INPUT, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m calibration.check", description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="small networks and few rounds")
    parser.add_argument("--minutes", type=float, default=5.0, help="time to take at most")
    parser.add_argument("--threads", type=int, default=1, help="threads of the processor")
    parser.add_argument("--keep", type=Path, help="file of rounds: an interrupted check goes on there")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a time misses its target")
    given = parser.parse_args(arguments)
    request = Request(given.short, given.minutes, given.threads, given.keep)
    return run(request, given.json, given.strict)


def check(
    device: str | None, scenario: Path | None, minutes: float, threads: int, short: bool, keep: Path | None,
    as_json: bool, strict: bool,
) -> int:  # fmt: skip
    """`python -m sim calibrate --check`: the exit code. On a GPU `keep` is the folder of traces."""
    if device == "cpu":
        if scenario is not None:
            print("--scenario: the check of a processor has networks of its own", file=sys.stderr)
            return WRONG_INPUT
        return run(Request(short, minutes, threads or 1, keep), as_json, strict)
    wrong = [] if scenario is not None else ["--scenario FILE: what to run on the GPU is expected"]
    wrong += ["--short: the check of a GPU runs the scenario as it is"] if short else []
    if scenario is None or wrong:
        print("\n".join(wrong), file=sys.stderr)
        return WRONG_INPUT
    folder = keep or Path("out") / f"{scenario.stem}@check"
    return told(lambda tell: check_scenario(scenario, "cuda", folder, tell), as_json, strict)


def run(request: Request, as_json: bool, strict: bool) -> int:
    """Check a processor, print, and answer with the exit code."""
    return told(lambda tell: check_cpu(request, tell), as_json, strict)


def told(checked: Callable[[Tell], Outcome], as_json: bool, strict: bool) -> int:
    try:
        outcome = with_progress(checked)
    except (ValueError, CalibrationError) as error:
        print(error, file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        print("Interrupted before the first round was over: nothing to compare.", file=sys.stderr)
        return INTERRUPTED
    if as_json:
        print(json.dumps(outcome.as_dict(), indent=2))
    else:
        show(Console(width=None if sys.stdout.isatty() else 160), outcome)
    return 0 if outcome.bytes_equal and (outcome.times_met or not strict) else MISMATCH


def with_progress(checked: Callable[[Tell], Outcome]) -> Outcome:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("checking", total=None)
        return checked(lambda what, done, of: bar.update(task, description=what, completed=done, total=of))
