"""What people ask of the cost profiles: which exist, what a figure rests on, how long one piece of work takes.

Rows and answers are data; `sim.report` and the command line print them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from sim.cost.collective import CollectiveCost, Placement
from sim.cost.copy import Direction
from sim.cost.figures import LABELS, SINGLE_SOURCE, Figure
from sim.cost.gpu import tensor_peak_flops_per_ns
from sim.cost.model import CostModel, Explanation
from sim.cost.own import OwnDevice
from sim.cost.profile import Profile, load_profile, profile_names
from sim.hardware.catalogue import find_gpu
from sim.program.kernels import Collective, Kernel, Work


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """One profile. `gemm_efficiency`: sustained share of the dense 16-bit peak, with its relative sigma and, where one
    source was fitted, that source's share; `gemm_flops_per_s` None for a variant without a GPU of its own."""

    name: str
    description: str
    gpus: tuple[str, ...]
    gemm_efficiency: float
    gemm_sigma: float
    single_source_efficiency: float | None
    gemm_flops_per_s: float | None
    attention: tuple[str, ...]
    """Kernel generations with figures."""
    labels: tuple[tuple[str, int], ...]
    """How many figures are measured, published, scaled, assumed."""


@dataclass(frozen=True, slots=True)
class FigureRow:
    """One figure of a profile under its dotted name."""

    name: str
    value: float
    label: str
    relative_sigma: float
    error: str
    source: str


@dataclass(frozen=True, slots=True)
class Answer:
    """How long one kernel takes alone: its time, a range of one sigma each way, the rates that this means, and why.

    `flops_per_s` and `bytes_per_s` count the work as it is defined (`Work.flops`, `Work.bytes`).
    """

    ns: int
    relative_sigma: float
    flops_per_s: float
    peak_share: float
    """flops_per_s over the dense peak of the GPU's 16-bit products, or as `peak_name` says."""
    peak_name: str
    bound: str
    """What bounds it; a processor has no tensor cores."""
    bytes_per_s: float
    explanation: Explanation

    @property
    def range_ns(self) -> tuple[int, int]:
        return _range(self.ns, self.relative_sigma)


@dataclass(frozen=True, slots=True)
class TransferAnswer:
    """How long a collective or copy takes alone; `parts` name the protocol, the wire bytes and what bounds it."""

    ns: int
    relative_sigma: float
    bytes: int
    cap_bytes_per_s: float
    latency_ns: int
    parts: tuple[tuple[str, float | int | str], ...]

    @property
    def range_ns(self) -> tuple[int, int]:
        return _range(self.ns, self.relative_sigma)


def profile_rows() -> list[ProfileRow]:
    """All profiles that ship, by name."""
    return [_row(load_profile(name)) for name in profile_names()]


def figure_rows(profile: Profile, prefix: str = "") -> list[FigureRow]:
    """Figures of a profile, or those whose dotted name starts with `prefix`."""
    return [_figure_row(name, figure) for name, figure in profile.figures if name.startswith(prefix)]


def ask_kernel(model: CostModel, work: Work, name: str = "kernel") -> Answer:
    """Time of one kernel with the parts of its form."""
    explanation = model.explain(Kernel(name, work))
    ns = model.kernel_ns(Kernel(name, work))
    seconds = max(ns, 1) / 1e9
    flops_per_s = work.flops / seconds
    own = model.gpu if isinstance(model.gpu, OwnDevice) else None
    return Answer(
        ns=ns,
        relative_sigma=model.uncertainty(work, name),
        flops_per_s=flops_per_s,
        peak_share=flops_per_s / (tensor_peak_flops_per_ns(model.gpu) * 1e9),
        peak_name="fastest product measured" if own else "dense 16-bit peak",
        bound=explanation.bound.replace("tensor cores", "arithmetic")
        if own and own.kind == "cpu"
        else explanation.bound,
        bytes_per_s=work.bytes / seconds,
        explanation=explanation,
    )


def ask_collective(model: CostModel, collective: Collective, placement: Placement) -> TransferAnswer:
    """Time of one collective over a group placed as said."""
    cost = model.collective(collective, placement)
    return _transfer(cost, model.collective_uncertainty(collective, placement))


def ask_copy(model: CostModel, size_bytes: int, direction: Direction, pinned: bool = True) -> TransferAnswer:
    """Time of one copy between the GPU and its host."""
    cost = model.copy(size_bytes, direction, pinned)
    parts = (("direction", direction), ("memory", "pinned" if pinned else "pageable"))
    flow = CollectiveCost(cost.latency_ns, cost.bytes, cost.cap_bytes_per_s, parts)
    return _transfer(flow, model.copy_uncertainty(direction))


def _row(profile: Profile) -> ProfileRow:
    figures = profile.figures
    efficiency = figures["gemm.efficiency"]
    single = figures.by_name.get(f"{SINGLE_SOURCE}gemm.efficiency")
    peak = tensor_peak_flops_per_ns(find_gpu(profile.gpus[0])) * 1e9 if profile.gpus else None
    counts: Counter[str] = Counter(figure.label for _, figure in figures)
    return ProfileRow(
        name=profile.name,
        description=profile.description,
        gpus=profile.gpus,
        gemm_efficiency=efficiency,
        gemm_sigma=figures.sigma("gemm.efficiency"),
        single_source_efficiency=single.value if single else None,
        gemm_flops_per_s=None if peak is None else efficiency * peak,
        attention=tuple(figures.under("attention")),
        labels=tuple((label, counts[label]) for label in LABELS if counts[label]),
    )


def _figure_row(name: str, figure: Figure) -> FigureRow:
    return FigureRow(name, figure.value, figure.label, figure.relative_sigma, figure.error, figure.source)


def _transfer(cost: CollectiveCost, sigma: float) -> TransferAnswer:
    return TransferAnswer(round(cost.alone_ns), sigma, cost.bytes, cost.cap_bytes_per_s, cost.latency_ns, cost.parts)


def _range(ns: int, relative_sigma: float) -> tuple[int, int]:
    """One sigma each way; downwards by division, since errors are ratios."""
    return round(ns / (1 + relative_sigma)), round(ns * (1 + relative_sigma))
