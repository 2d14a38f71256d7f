"""What stops a report: input that is wrong although the scenario is right, files that cannot be written."""

from __future__ import annotations

from pathlib import Path


class RunError(Exception):
    """A run that cannot be carried out; the message is for the user."""


def cannot_write(error: OSError, path: Path) -> RunError:
    """The error for a file or folder that cannot be written."""
    return RunError(f"{error.filename or path}: cannot be written: {(error.strerror or str(error)).lower()}")
