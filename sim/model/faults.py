"""What is wrong with a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with a model: the field to blame (dotted), its value, what is the matter, the names allowed."""

    field: str
    value: Any
    message: str
    allowed: tuple[str, ...] = ()


class ModelError(ValueError):
    """All faults of one model."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(f"{fault.field}: {fault.message}" for fault in self.faults))
