"""torch, for the scripts that measure; without it one line that says what to install."""

from __future__ import annotations

from calibration.measure.words import NO_TORCH

try:
    import torch
except ImportError:
    raise SystemExit(NO_TORCH) from None

__all__ = ["torch"]
