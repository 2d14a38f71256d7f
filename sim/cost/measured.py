"""Measured times of single pieces of work, looked up before any fit is asked.

Times belong to a kernel's name and its work. A matrix product or attention of another name is the same work; a
memory-bound kernel of another name is not (an addition and a GELU of equal bytes differ).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sim.program.kernels import Attention, Collective, Gemm, HostCopy, Kernel, Memory, Operator, Work

Measurable = Gemm | Attention | Memory | Collective | HostCopy | Operator
KINDS: Mapping[str, type[Measurable]] = {
    "gemm": Gemm,
    "attention": Attention,
    "memory": Memory,
    "collective": Collective,
    "copy": HostCopy,
}
"""Those that a file can hold; operators of a CPU are timed and looked up in one session (`calibration.check`)."""
LEAST_SIGMA = 0.01
"""Of a median over rounds: clocks and neighbours move by as much between one run and the next."""


class WorkError(ValueError):
    """A mapping that describes no work; the message says what is expected."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Median time in ns, and half the distance of 10th and 90th percentile as a share of it."""

    ns: int
    relative_sigma: float = LEAST_SIGMA


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """Times by (kernel name, work) and, for products and attention, by work alone."""

    by_kernel: Mapping[tuple[str, Measurable], Timing]
    by_work: Mapping[Measurable, Timing]

    @classmethod
    def of(cls, entries: Iterable[tuple[str, Measurable, Timing]]) -> MeasuredTable:
        """The first entry of a kernel counts; of a work the first under any name."""
        by_kernel: dict[tuple[str, Measurable], Timing] = {}
        by_work: dict[Measurable, Timing] = {}
        for name, work, timing in entries:
            work = bare(work)
            by_kernel.setdefault((name, work), timing)
            if not isinstance(work, Memory):
                by_work.setdefault(work, timing)
        return cls(by_kernel, by_work)

    def find(self, kernel: Kernel, work: Work | None = None) -> Timing | None:
        """The time of a kernel; `work` stands for its own where another kernel does it."""
        looked_up = kernel.work if work is None else work
        if not self.by_kernel or not isinstance(looked_up, Gemm | Attention | Memory | Operator):
            return None
        key = bare(looked_up)
        return self.by_kernel.get((kernel.name, key)) or self.by_work.get(key)

    def find_collective(self, work: Collective) -> Timing | None:
        """The time of a collective inside a node."""
        return self.by_work.get(bare(work)) if self.by_work else None

    def __len__(self) -> int:
        return len(self.by_kernel)

    def __iter__(self) -> Iterator[tuple[str, Measurable, Timing]]:
        for (name, work), timing in self.by_kernel.items():
            yield name, work, timing


NOTHING_MEASURED = MeasuredTable({}, {})


def bare(work: Measurable) -> Measurable:
    """The work without what never decides its time; a product by its sizes, as profilers show it."""
    if isinstance(work, Memory):
        return replace(work, flops=0)
    if isinstance(work, Gemm):
        return replace(work, over_rows=False)
    return replace(work, group="") if isinstance(work, Collective) else work


def work_to_dict(work: Measurable) -> dict[str, Any]:
    """{"gemm": {"m": 8192, ...}}: one key, the kind; fields at their defaults are left out."""
    kind = next(name for name, of in KINDS.items() if isinstance(work, of))
    values = {f.name: getattr(work, f.name) for f in fields(work)}
    defaults = {f.name: f.default for f in fields(work)}
    return {kind: {name: value for name, value in values.items() if value != defaults[name]}}


def work_from_dict(entry: Any) -> Measurable:
    """The work that `work_to_dict` wrote. Raises WorkError."""
    if not isinstance(entry, Mapping) or len(entry) != 1 or next(iter(entry)) not in KINDS:
        raise WorkError(f"one of {', '.join(KINDS)} is expected, e.g. gemm: {{m: 8192, n: 4096, k: 4096}}")
    kind, values = next(iter(entry.items()))
    of = KINDS[kind]
    known = {f.name for f in fields(of)}
    if not isinstance(values, Mapping) or not set(values) <= known:
        raise WorkError(f"{kind} has the fields {', '.join(sorted(known))}")
    try:
        return of(**values)
    except TypeError:
        raise WorkError(f"{kind} lacks one of the fields {', '.join(sorted(known))}") from None
