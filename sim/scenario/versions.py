"""Versions of PyTorch: which are imitated, and against which the bytes were recorded."""

from __future__ import annotations

OLDEST, NEWEST = (2, 4), (2, 14)
"""Between these the rules of the nearest recorded version are taken without a warning."""
RECORDED_ALLOCATOR = ((2, 9), (2, 12), (2, 13), (2, 14))
"""Versions whose caching allocator was recorded."""
RECORDED_AUTOGRAD = ((2, 14),)
"""Versions of which training steps were recorded: what operators save and allocate."""


def minor_of(version: str) -> tuple[int, int]:
    """ "2.14.1" -> (2, 14)."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def nearest_known(version: str) -> str:
    """The version itself where it is imitated, else the end of the range that is nearer."""
    return "{}.{}".format(*min(max(minor_of(version), OLDEST), NEWEST))
