"""The verbs. `python -m sim --help` lists them; each is a thin layer over the room that does the work."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from sim import __version__

if TYPE_CHECKING:
    from sim.program.kernels import Work
    from sim.report.summary import RunSummary
    from sim.scenario.setup import Setup

Jobs = Annotated[int | None, typer.Option("--jobs", min=1, help="Strategies played at a time (default: processors).")]
SOME_FITS, MISTAKE, WRONG_INPUT, NONE_FITS, INTERRUPTED = 0, 1, 2, 3, 130
DEBUG = "SIM_DEBUG"
"""Environment variable: let tracebacks through."""

app = typer.Typer(
    name="sim",
    help="Play one training step of a neural network without a GPU: time, memory, and why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@contextmanager
def answers_errors() -> Iterator[None]:
    """Errors of the user's input become text on stderr and exit code 2; Ctrl-C one line and 130; a bug one line and 1."""
    from sim.cost.figures import CostError
    from sim.hardware.mesh import MeshError
    from sim.report.errors import RunError
    from sim.scenario.problems import ScenarioError
    from sim.units import UnitError

    try:
        yield
        sys.stdout.flush()
    except typer.Exit:
        raise
    except (ScenarioError, RunError, CostError, MeshError, UnitError) as error:
        stop(str(error))
    except BrokenPipeError:  # the reader has seen enough
        to_nowhere()
        raise typer.Exit from None
    except OSError as error:
        if error.filename is None:  # stdout's: files say which they are
            raise
        stop(f"{error.filename}: {(error.strerror or str(error)).lower()}")
    except KeyboardInterrupt:
        stop("Interrupted.", INTERRUPTED)
    except Exception as error:
        if DEBUG in os.environ:
            raise
        stop(f"A mistake in sim, not in your input: {error!r}. {DEBUG}=1 shows where; please report it.", MISTAKE)


def to_nowhere() -> None:
    """What is left of stdout's buffer would fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stop(message: str, code: int = WRONG_INPUT) -> NoReturn:
    print(message, file=sys.stderr)
    raise typer.Exit(code)


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
        from sim.report.files import strategy_folders, write_summary
        from sim.report.read import with_earlier
        from sim.report.runner import Task, play_all
        from sim.report.summary import summarize_run

        loaded = load(scenario, overrides or ())
        setups = chosen(loaded.strategies, only or ())
        folders: list[Path | None] = [None] * len(setups)
        if not no_files:
            every = strategy_folders(out, loaded.title, [setup.name for setup in loaded.strategies])
            folders = [folder for folder, setup in zip(every, loaded.strategies) if setup in setups]
        tasks = [Task(scenario=loaded, setup=setup, folder=folder) for setup, folder in zip(setups, folders)]
        summary = summarize_run(loaded, tuple(answer.summary for answer in play_all(tasks, jobs)))
        written = [folder for folder in folders if folder is not None]
        if written:
            write_summary(written[0].parent, with_earlier(written[0].parent, summary, loaded))
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
    jobs: Jobs = None,
) -> None:
    """Put strategies side by side, with differences against the first: a table, and all curves in compare.png.

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
            written = write_comparison(out, entries)
            console.print(f"\nFigure: {written}" if written else "\nNothing to draw.", soft_wrap=True)
        raise typer.Exit(exit_code([entry.summary.fits for entry in entries], strict=False))


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
    name: Annotated[str | None, typer.Argument(help="One profile: all its figures with label and source.")] = None,
    only: Annotated[str, typer.Option("--only", help="Figures whose name starts with this, e.g. attention.")] = "",
) -> None:
    """List the cost profiles, or the figures of one.

    Example: python -m sim profiles h100-sxm --only gemm
    """
    from sim.cost.listing import figure_rows, profile_rows
    from sim.cost.profile import load_profile
    from sim.report.console import make_console
    from sim.report.costs import figure_table, profile_table

    with answers_errors():
        table = profile_table(profile_rows()) if name is None else figure_table(figure_rows(load_profile(name), only))
        make_console().print(table)


cost = typer.Typer(help="How long does one kernel, collective or copy take, and why?", no_args_is_help=True)
app.add_typer(cost, name="cost")
OnGpu = Annotated[str, typer.Option("--gpu", help="GPU by name or alias.")]
WithProfile = Annotated[str | None, typer.Option("--profile", help="Cost profile (default: the GPU's own).")]
Count = Annotated[int, typer.Argument(min=1)]
OfDtype = Annotated[str, typer.Option("--dtype", help="bf16, fp16, fp32 or fp8.")]


@cost.command()
def gemm(
    m: Count,
    n: Count,
    k: Count,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    dtype: OfDtype = "bf16",
    gpu: OnGpu = "h100-sxm",
    profile: WithProfile = None,
) -> None:
    """C[m, n] = A[m, k] B[k, n].

    Example: python -m sim cost gemm 8192 4096 14336 --gpu h100-sxm
    """
    from sim.program.kernels import Gemm

    _price_kernel(lambda: Gemm(m, n, k, dtype, batch), gpu, profile)


@cost.command()
def attention(
    batch: Count, heads: Count, kv_heads: Count, seq_len: Count, head_dim: Count, backward: bool = False, causal: bool = True,
    generation: str = "flash2", gpu: OnGpu = "h100-sxm", profile: WithProfile = None,
) -> None:  # fmt: skip
    """A fused attention kernel.

    Example: python -m sim cost attention 1 32 8 8192 128 --backward
    """
    from sim.program.kernels import Attention

    def work() -> Attention:
        return Attention(batch, heads, kv_heads, seq_len, seq_len, head_dim, causal, backward, generation)

    _price_kernel(work, gpu, profile)


@cost.command()
def memory(family: str, size: str, gpu: OnGpu = "h100-sxm", profile: WithProfile = None) -> None:
    """A memory-bound kernel that moves SIZE bytes (reads and writes).

    Example: python -m sim cost memory elementwise "192 MiB"
    """
    from sim.program.kernels import Memory
    from sim.units import parse_bytes

    _price_kernel(lambda: Memory(family, parse_bytes(size)), gpu, profile)


@cost.command()
def collective(
    kind: str,
    size: str,
    ranks: Annotated[int, typer.Option(min=1)] = 8,
    gpus_per_node: Annotated[int, typer.Option(min=1)] = 8,
    gpu: OnGpu = "h100-sxm",
    profile: WithProfile = None,
) -> None:
    """A collective over RANKS GPUs; SIZE is the full buffer.

    Example: python -m sim cost collective all_gather "416 MiB" --ranks 16
    """
    from typing import cast

    from sim.cost.listing import ask_collective
    from sim.hardware.mesh import Mesh
    from sim.program.kernels import Collective, CollectiveKind
    from sim.report.costs import transfer_table
    from sim.report.questions import cost_of, print_table
    from sim.units import parse_bytes

    with answers_errors():
        work = Collective(cast("CollectiveKind", kind), parse_bytes(size), "group", ranks)
        placement = Mesh((("group", ranks),), gpus_per_node, ranks).span("group")
        print_table(transfer_table(ask_collective(cost_of(gpu, profile), work, placement)))


@cost.command()
def copy(
    size: str, to_host: bool = False, pinned: bool = True, gpu: OnGpu = "h100-sxm", profile: WithProfile = None
) -> None:
    """A copy between a GPU and its host.

    Example: python -m sim cost copy "64 MiB" --to-host
    """
    from sim.cost.listing import ask_copy
    from sim.report.costs import transfer_table
    from sim.report.questions import cost_of, print_table
    from sim.units import parse_bytes

    with answers_errors():
        model, size_bytes = cost_of(gpu, profile), parse_bytes(size)
        print_table(
            transfer_table(ask_copy(model, size_bytes, "device_to_host" if to_host else "host_to_device", pinned))
        )


def _price_kernel(work: Callable[[], Work], gpu: str, profile: str | None) -> None:
    from sim.cost.listing import ask_kernel
    from sim.report.costs import kernel_table
    from sim.report.questions import cost_of, print_table

    with answers_errors():
        print_table(kernel_table(ask_kernel(cost_of(gpu, profile), work())))


def chosen(setups: Sequence[Setup], names: Sequence[str]) -> list[Setup]:
    """The strategies of those names, in the scenario's order; all where no name is given."""
    known = [setup.name for setup in setups]
    for name in names:
        if name not in known:
            from sim.scenario.problems import nearest_name

            near = nearest_name(name, known)
            stop(f"--only {name}: one of {', '.join(known)}{f' (did you mean {near}?)' if near else ''}")
    return [setup for setup in setups if not names or setup.name in names]


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
