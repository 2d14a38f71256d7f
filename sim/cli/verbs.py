"""The verbs. `python -m sim --help` lists them; each is a thin layer over the room that does the work."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sim import __version__
from sim.cli.calibrate import calibrate
from sim.cli.cost import cost
from sim.cli.diff import diff
from sim.cli.errors import MISTAKE, NONE_FITS, SOME_FITS, WRONG_INPUT, answers_errors, stop, to_nowhere
from sim.cli.explain import explain
from sim.cli.interop import export_config, import_config
from sim.cli.only import chosen
from sim.cli.report import report

if TYPE_CHECKING:
    from sim.report.summary import RunSummary

Jobs = Annotated[int | None, typer.Option("--jobs", min=1, help="Strategies played at a time (default: processors).")]

app = typer.Typer(
    name="sim",
    help="Play one training step of a neural network without a GPU: time, memory, and why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cost, name="cost")
app.command()(calibrate)
app.command()(explain)
app.command()(diff)
app.command()(report)
app.command("import")(import_config)
app.command("export")(export_config)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        print(f"sim {__version__}")
        raise typer.Exit


@app.command()
def run(
    scenario: Annotated[Path, typer.Argument(help="A scenario file.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object (docs/json.md) and nothing else.")
    ] = False,
    no_files: Annotated[bool, typer.Option("--no-files", help="Write no tables, traces and figures.")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the files go.")] = Path("out"),
    every_rank: Annotated[
        bool, typer.Option("--every-rank", help="Also write trace and snapshot of every pipeline rank, under ranks/.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 if any strategy does not fit.")] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Change a field; repeatable.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="STRATEGY", help="Play this strategy; repeatable.")
    ] = None,
    jobs: Jobs = None,
) -> None:
    """Play every strategy of a scenario: one screen, and files under out/<scenario>/<strategy>/.

    With --set the files go to a folder of their own, e.g. out/fsdp_ckpt@batch.seq_len=4096. A section that is set
    ({...}) merges with the scenario's, also `strategies`: --only chooses among them.

    Exit code: 0 a strategy fits, 3 none does, 2 wrong input.

    Example: python -m sim run scenarios/fsdp_ckpt.yaml --set batch.seq_len=4096
    """
    with answers_errors():
        from sim.api import load
        from sim.report.files import strategy_folders, write_run
        from sim.report.read import with_earlier
        from sim.report.runner import Task, play_all
        from sim.report.summary import summarize_run

        loaded = load(scenario, overrides or ())
        setups = chosen(loaded.strategies, only or ())
        folders: list[Path | None] = [None] * len(setups)
        if not no_files:
            every = strategy_folders(out, loaded.title, [setup.name for setup in loaded.strategies])
            folders = [folder for folder, setup in zip(every, loaded.strategies) if setup in setups]
        tasks = [
            Task(scenario=loaded, setup=setup, folder=folder, every_rank=every_rank)
            for setup, folder in zip(setups, folders)
        ]
        summary = summarize_run(loaded, tuple(answer.summary for answer in play_all(tasks, jobs)))
        written = [folder for folder in folders if folder is not None]
        if written:
            write_run(written[0].parent, with_earlier(written[0].parent, summary, loaded), loaded.text)
        show(summary, as_json, written)
        raise typer.Exit(exit_code([strategy.fits for strategy in summary.strategies], strict))


def show(summary: RunSummary, as_json: bool, folders: Sequence[Path]) -> None:
    """The answer on stdout."""
    if as_json:
        from sim.report.summary import to_json

        print(to_json(summary))
        return
    from sim.report.console import make_console, show_run

    show_run(make_console(), summary, folders)


@app.command()
def compare(
    files: Annotated[list[Path], typer.Argument(help="Scenario files, run folders, or summary.json files.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where compare.png goes.")] = Path("out"),
    no_files: Annotated[bool, typer.Option("--no-files", help="Draw no figure.")] = False,
    svg: Annotated[bool, typer.Option("--svg", help="Draw compare.svg instead of compare.png.")] = False,
    jobs: Jobs = None,
) -> None:
    """Put strategies side by side, with differences against the first: a table, and all curves in compare.png.

    "Bound by" is memory where a strategy does not fit, else what compute waits for most (network, PCIe, pipeline
    bubble, host), with its share of the step; compute where no wait reaches a tenth.

    Example: python -m sim compare out/fsdp_ckpt/none out/fsdp_ckpt/full
    """
    with answers_errors():
        from sim.report.compare import compare_tables, gather, token_warning, write_comparison
        from sim.report.console import make_console

        entries = gather(files, jobs)
        console = make_console()
        for number, table in enumerate(compare_tables(entries, console.width)):
            console.print(*([""] if number else []), table)
        if (warning := token_warning(entries)) is not None:
            print(warning, file=sys.stderr)
        if not no_files:
            written = write_comparison(out, entries, "svg" if svg else "png")
            console.print(f"\nFigure: {written}" if written else "\nNothing to draw.", soft_wrap=True)
        raise typer.Exit(exit_code([entry.summary.fits for entry in entries], strict=False))


@app.command()
def validate(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Files of cases (default: those that come with sim).")
    ] = None,
    table: Annotated[
        Path | None, typer.Option("--table", metavar="CSV", help="Score published runs instead (docs/validation.md).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="CSV", help="Where the scored table goes; is continued.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Score rows anew that --out holds already.")] = False,
    row_limit: Annotated[
        float, typer.Option("--row-limit", metavar="SECONDS", min=0.001, help="Time for one row.")
    ] = 600,
    summary: Annotated[
        list[Path] | None, typer.Option("--summary", metavar="CSV|DIR", help="Sum up scored tables; repeatable.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="CASE", help="Play this case; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    jobs: Jobs = None,
) -> None:
    """Compare with published figures: cases by default, or a table of training runs row by row.

    Exit code: 0 every case is met, 1 a case misses its class, 2 wrong input. A scored table exits with 0.

    Example: python -m sim validate --table runs.csv --out scored.csv
    """
    with answers_errors():
        from sim.report import validation

        if summary:
            validation.show_summary(summary, as_json)
        elif table is not None or out is not None:
            validation.show_scored(table, out, jobs, again, row_limit, as_json)
        elif not validation.show_cases(files or [], only or [], jobs, as_json):
            raise typer.Exit(MISTAKE)


@app.command()
def schema() -> None:
    """Print the JSON Schema of scenario files, for editors.

    Example: python -m sim schema > scenario.schema.json
    """
    import json

    from sim.scenario import json_schema

    with answers_errors():
        print(json.dumps(json_schema(), indent=2))


@app.command()
def fields(
    section: Annotated[
        str | None, typer.Argument(help="One section, e.g. checkpoint or parallel.fsdp (default: all).")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, as docs/fields.md holds it.")] = False,
) -> None:
    """Say what the fields of a scenario mean, what they take, and their defaults.

    Example: python -m sim fields checkpoint
    """
    from sim.report.console import make_console
    from sim.scenario import field_reference, section_names
    from sim.scenario.problems import nearest_name

    with answers_errors():
        if section is not None and section not in section_names():
            near = nearest_name(section, section_names())
            hint = f" (did you mean {near}?)" if near else ""
            stop(f"{section}: one of {', '.join(section_names())}{hint}")
        text = field_reference(section)
        if markdown:
            print(text, end="")
        else:
            from rich.markdown import Markdown

            make_console().print(Markdown(text))


@app.command()
def gpus() -> None:
    """List the GPUs that a scenario can name.

    Example: python -m sim gpus
    """
    from sim.report.catalogues import gpu_table
    from sim.report.console import make_console

    with answers_errors():
        make_console().print(gpu_table())


@app.command()
def presets() -> None:
    """List the models that a scenario can name.

    Example: python -m sim presets
    """
    from sim.report.catalogues import preset_table
    from sim.report.console import make_console

    with answers_errors():
        make_console().print(preset_table())


@app.command()
def profiles(
    name: Annotated[
        str | None, typer.Argument(help="One profile, or a file of your own: all its figures with label and source.")
    ] = None,
    only: Annotated[str, typer.Option("--only", help="Figures whose name starts with this, e.g. attention.")] = "",
) -> None:
    """List the cost profiles, or the figures of one.

    Example: python -m sim profiles h100-sxm --only gemm
    """
    from sim.cost.listing import figure_rows, profile_rows
    from sim.cost.own import profile_named
    from sim.report.console import make_console
    from sim.report.costs import figure_table, profile_table

    with answers_errors():
        table = profile_table(profile_rows()) if name is None else figure_table(figure_rows(profile_named(name), only))
        make_console().print(table)


def exit_code(fits: list[bool], strict: bool) -> int:
    """0 if at least one strategy fits (all of them where `strict`), else 3."""
    return SOME_FITS if (all(fits) if strict else any(fits)) else NONE_FITS


def main() -> None:
    """Entry point of `sim` and `python -m sim`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? instead of failing
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:
        to_nowhere()
        print(f"stdout: cannot be written: {(error.strerror or str(error)).lower()}", file=sys.stderr)
        sys.exit(WRONG_INPUT)
