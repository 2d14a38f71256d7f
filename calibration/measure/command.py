"""The command line of one family's script, and what all of them share with `python -m sim calibrate`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from calibration.measure import ranks
from calibration.measure.campaign import Plan, Report, plan, run
from calibration.measure.device import Device, open_device
from calibration.measure.points import NoFile, PointFile
from calibration.measure.words import DEVICES, CalibrationError

MINUTES = 5.0
ENDING = ".points.jsonl"


SEVERAL = "torchrun --nproc-per-node 8 -m sim calibrate ..."
"""How, for as many as there are GPUs."""


def points_path(profile: Path) -> Path:
    """The file of points beside a profile: mine.yaml -> mine.points.jsonl."""
    return profile.with_name(profile.stem + ENDING)


def plan_for(device: Device, families: Sequence[str], scenario: Path | None = None) -> Plan:
    """Everything that these families measure, the scenario's shapes first. Raises ScenarioError."""
    from calibration.measure import collectives
    from calibration.measure.families import cases_of, readings_of

    first, left_out = [], []
    if scenario is not None:
        from calibration.measure.scenario import work_of

        work = work_of(scenario)
        first = [case for case in (*collectives.of_scenario(work.collectives), *work.cases) if case.family in families]
        left_out = [f"{name}: no script runs it ({count} in a run)" for name, count in work.left_out.most_common()]
    designs = [cases_of(family, device) for family in families]
    readings = [reading for family in families for reading in readings_of(family, device)]
    planned = plan(first, designs, readings)
    planned.left_out += left_out
    if collectives.FAMILY in families and ranks.size() == 1:
        planned.left_out.append(f"{collectives.FAMILY}: need several processes: {SEVERAL}")
    return planned


class Bar:
    """A line on stderr that says what is being measured and how much is left."""

    def __init__(self, console: Console | None = None) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console or Console(stderr=True), transient=True)
        self.task = None

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def start(self, total: int) -> None:
        self.task = self.progress.add_task("calibrating", total=total)

    def step(self, title: str) -> None:
        if self.task is not None:
            self.progress.update(self.task, advance=1, description=title[:60])


def measure_families(
    device: Device, families: Sequence[str], points: Path, minutes: float, scenario: Path | None = None
) -> Report:
    """Measure under a progress bar; points go to the file."""
    ranks.join(device.name)
    planned = plan_for(device, families, scenario)
    if ranks.rank():
        return run(device, planned, NoFile(), minutes)
    file = PointFile(points, device.info().as_dict())
    with Bar() as bar:
        return run(device, planned, file, minutes, bar)


def told(report: Report, points: Path) -> str:
    """What came of it, in a few lines."""
    lines = [f"{report.measured} points measured in {report.seconds:.0f} s, {report.known} known before: {points}"]
    if report.out_of_time:
        lines.append(f"Out of time with {report.out_of_time} to go: run again to go on, or give more --minutes.")
    lines += [f"Not measured: {reason}" for reason in report.left_out]
    if report.interrupted:
        lines.append("Interrupted: what was measured is kept; run again to go on.")
    return "\n".join(lines)


def main(family: str, arguments: Sequence[str] | None = None) -> None:
    """Run one family alone: its points, no profile."""
    parser = argparse.ArgumentParser(description=f"Measure the family {family} on a device.")
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--minutes", type=_minutes, default=MINUTES, help="time to take at most")
    parser.add_argument("--scenario", type=Path, help="measure this scenario's shapes first")
    parser.add_argument("--threads", type=int, default=0, help="of a CPU (default: torch's)")
    parser.add_argument("--out", type=Path, help="file of points (default: <family>-<device>.points.jsonl)")
    given = parser.parse_args(arguments)
    points = given.out or Path(f"{family}-{given.device}{ENDING}")
    try:
        report = measure_families(
            open_device(given.device, given.threads), [family], points, given.minutes, given.scenario
        )
    except CalibrationError as error:
        parser.error(str(error))
    if not ranks.rank():
        print(told(report, points))
    code = 130 if report.interrupted else 0
    ranks.end(code)
    sys.exit(code)


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < 24 * 60:
        raise argparse.ArgumentTypeError(f"{text}: a number of minutes above 0 is expected, e.g. 5")
    return minutes
