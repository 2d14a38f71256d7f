"""For all tests: a slow moment of a shared machine is no failure of a property."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
