"""The command line."""

from sim.cli.verbs import app, main

__all__ = ["app", "main"]
