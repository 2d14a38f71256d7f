"""What the user is told where a verb cannot go on, and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

SOME_FITS, MISTAKE, WRONG_INPUT, NONE_FITS, INTERRUPTED = 0, 1, 2, 3, 130
DEBUG = "SIM_DEBUG"
"""Environment variable: let tracebacks through."""


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
