"""Figures: the memory curve stacked by owner, over the stream lanes of the same step.

Colours keep apart for colour-blind eyes (Paul Tol's qualitative schemes), and every one is named in a legend.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np

from sim.program.program import OWNER_LABELS, Ints, Owner
from sim.program.world import Floats
from sim.report.picture import COMMUNICATION, COPY_IN, LANE_NAMES, STALL, Picture
from sim.units import format_bytes, format_duration

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB, MIB = 1 << 30, 1 << 20
DPI = 110
CELL_INCHES = 3.1
WIDTH_INCHES, CURVE_INCHES, LANE_INCHES, MARGIN_INCHES = 12.7, 4.3, 0.33, 1.3
PLAIN = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
FAINTEST = 0.2
"""Of the colour: what runs for an instant is still seen."""
FAR_APART = 50
"""Scales so far apart are not shared: the smaller curve would be a line on the axis."""
MIN_LANES = 3
"""As high as the legend beside the lanes."""
LEFT_PART = 0.6
"""Of the step: a peak in it has its words on the right."""
SHOW_CAPACITY_FROM = 0.35
"""Of capacity: a lower curve would be squeezed flat by a line so far above it."""

OWNER_COLOURS = {
    Owner.PARAMETER: "#332288",
    Owner.OPTIMIZER: "#88CCEE",
    Owner.GRADIENT: "#44AA99",
    Owner.GATHERED: "#117733",
    Owner.REDUCE_SCATTER: "#999933",
    Owner.CHECKPOINT: "#DDCC77",
    Owner.ACTIVATION: "#CC6677",
    Owner.RECOMPUTED: "#882255",
    Owner.ACTIVATION_GRADIENT: "#AA4499",
    Owner.LOSS: "#EE7733",
    Owner.WORKSPACE: "#777777",
    Owner.OTHER: "#BBBBBB",
}
"""From the bottom of the stack to its top: what stays, then what comes and goes."""
HOST_COLOUR = "#7A4A1E"
STACK = {OWNER_LABELS[owner]: colour for owner, colour in OWNER_COLOURS.items()}

WORK_COLOURS = {
    "init": "#BBBBBB",
    "data": "#BBBBBB",
    "forward": "#0077BB",
    "loss": "#EE7733",
    "recompute": "#882255",
    "backward": "#66B8A8",
    "clip": "#777777",
    "optimizer": "#DDAA33",
    "zero_grad": "#BBBBBB",
    COPY_IN: "#99BB99",
    "all_gather": "#117733",
    "reduce_scatter": "#999933",
    "all_reduce": "#332288",
    "tensor_parallel": "#117733",
    "data_parallel": "#999933",
    "context_parallel": "#AA4499",
    COMMUNICATION: "#332288",
    "device_to_host": "#AA7744",
    "host_to_device": "#D9B26A",
    "nvme_read": "#8C6BB1",
    "nvme_write": "#4D004B",
    STALL: "#CC3311",
}


def timeline_figure(picture: Picture, title: str) -> Figure:
    """One strategy: its curve over its lanes."""
    from matplotlib.figure import Figure

    lanes_height = LANE_INCHES * max(len(picture.lanes), MIN_LANES)
    height = CURVE_INCHES + lanes_height + MARGIN_INCHES
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI)
    grid = {"height_ratios": (CURVE_INCHES, lanes_height), "hspace": 0.12, "left": 0.08, "right": 0.745}
    grid |= {"bottom": 0.5 / height, "top": 1 - 0.35 / height}
    memory_axes, lane_axes = figure.subplots(2, 1, sharex=True, gridspec_kw=grid)
    figure.suptitle(title, x=0.01, y=1 - 0.1 / height, ha="left", va="top", fontsize=12, fontweight="bold")
    draw_memory(memory_axes, picture, top_bytes(picture))
    draw_lanes(lane_axes, picture)
    legend_of_owners(memory_axes, picture)
    legend_of_work(lane_axes, [picture])
    lane_axes.set_xlabel("ms from the start of the steady step (device time)")
    return figure


def top_bytes(picture: Picture) -> int:
    """Upper end of the memory axis: with the capacity line where the curve comes near it."""
    near = picture.top_bytes > SHOW_CAPACITY_FROM * picture.capacity_bytes
    return max(picture.top_bytes, picture.capacity_bytes if near else 0)


def draw_memory(axes: Axes, picture: Picture, top: int, compact: bool = False) -> None:
    """The stack, the reserved line, the capacity line, and the peak with its cause; `top` bytes fit on the axis.

    `compact`: small words, for a figure of many.
    """
    unit, name = (GIB, "GiB") if top >= 2 * GIB else (MIB, "MiB")
    times = np.append(picture.times_ms, picture.step_ms)
    bottom = np.zeros(len(times))
    for label, colour in STACK.items():
        if label in picture.owners:
            curve = picture.owners[label] / unit
            upper = bottom + np.append(curve, curve[-1:])
            axes.fill_between(times, bottom, upper, step="post", color=colour, linewidth=0)
            bottom = upper
    axes.step(times, bottom, where="post", color="black", linewidth=0.5)
    reserved = np.append(picture.reserved_bytes, picture.reserved_bytes[-1:]) / unit
    axes.step(times, reserved, where="post", color="black", linewidth=1.1, linestyle=(0, (1, 1)))
    if not compact:
        _note(axes, "reserved", (picture.step_ms, reserved[-1]), (-4, -3), ha="right", va="top")
    if picture.host is not None:
        _draw_host(axes, picture, *picture.host, unit, compact)
    _draw_capacity(axes, picture, top, unit)
    axes.set_ylim(0, top / unit * 1.16)
    axes.set_xlim(0, picture.step_ms)
    axes.set_ylabel(name)
    axes.spines[["top", "right"]].set_visible(False)
    if compact:
        cause, right = picture.peak_place.partition(" (")[0], picture.peak_ms < LEFT_PART * picture.step_ms
        at, side = (picture.peak_ms, picture.peak_bytes / unit), "left" if right else "right"
        _note(axes, cause, at, (6 if right else -6, 0), ha=side, fontsize=8, fontweight="bold", bbox=PLAIN)
    else:
        _draw_peak(axes, picture, unit)


def _note(axes: Axes, text: str, at: tuple[float, float], shift: tuple[float, float], **look: Any) -> None:
    """Words beside a point, `shift` in points."""
    axes.annotate(text, at, shift, textcoords="offset points", **{"fontsize": 8.5, **look})


def _draw_host(axes: Axes, picture: Picture, times_ms: Floats, used: Ints, unit: int, compact: bool) -> None:
    """What lies in host memory instead: a line of its own over the stack."""
    heights = np.append(used, used[-1:]) / unit
    axes.step(np.append(times_ms, picture.step_ms), heights, where="post", color=HOST_COLOUR, linewidth=1.3)
    if not compact:
        at = int(np.argmax(used))
        text = f"{format_bytes(int(used[at]))} in host memory"
        _note(axes, text, (times_ms[at], heights[at]), (4, 3), color=HOST_COLOUR, bbox=PLAIN)


def _draw_capacity(axes: Axes, picture: Picture, top: int, unit: int) -> None:
    text, red = f"{format_bytes(picture.capacity_bytes)} is what PyTorch can get", "#CC3311"
    if top < picture.capacity_bytes:
        _note(axes, f"{text}, far above", (0, 1), (4, -4), xycoords="axes fraction", va="top", color=red)
        return
    height = picture.capacity_bytes / unit
    axes.axhline(height, color=red, linewidth=1.4, linestyle="--")
    at, shift, side = (0.0, 4, "left") if picture.fits else (picture.step_ms, -4, "right")  # beside the curve
    _note(axes, text, (at, height), (shift, 3), ha=side, color=red, bbox=PLAIN)


def _draw_peak(axes: Axes, picture: Picture, unit: int) -> None:
    height = picture.peak_bytes / unit
    right = picture.peak_ms < LEFT_PART * picture.step_ms
    dot: dict[str, Any] = {
        "marker": "o",
        "markersize": 6,
        "color": "white",
        "markeredgecolor": "black",
        "zorder": 5,
        "clip_on": False,
    }
    axes.plot([picture.peak_ms], [height], **dot)
    text = f"peak {format_bytes(picture.peak_bytes)}: {picture.peak_place}"
    box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "#444444", "alpha": 0.92}
    look = {"ha": "left" if right else "right", "va": "bottom", "fontsize": 9.5, "fontweight": "bold", "zorder": 6}
    _note(axes, text, (picture.peak_ms, height), (10 if right else -10, 8), bbox=box, **look)


def draw_lanes(axes: Axes, picture: Picture) -> None:
    """One row per stream, compute on top; the paler, the less of the time something runs."""
    from matplotlib.colors import to_rgba

    for row, lane in enumerate(picture.lanes):
        for kind, times_ms in lane.work.items():
            bars = [(start, end - start) for start, end, _ in times_ms.tolist()]
            colours = [to_rgba(WORK_COLOURS[kind], max(share, FAINTEST)) for share in times_ms[:, 2].tolist()]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colours, linewidth=0, antialiased=False)
    names = [lane.name for lane in picture.lanes]
    if picture.copy_over_compute is not None:
        ratio = f"to host\n{picture.copy_over_compute:.1f} x forward"
        names = [ratio if name == LANE_NAMES["device_to_host"] else name for name in names]
    axes.set_yticks(range(len(names)), names, fontsize=8.5)
    axes.set_ylim(max(len(picture.lanes), 2) - 0.5, -0.5)
    axes.set_xlim(0, picture.step_ms)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def legend_of_owners(axes: Axes, picture: Picture) -> None:
    """Owners as they are stacked, each with its bytes at the peak."""
    from matplotlib.patches import Patch

    at = int(np.searchsorted(picture.times_ms, picture.peak_ms, "right")) - 1
    patches = []
    for label, colour in reversed(STACK.items()):
        if label in picture.owners and picture.owners[label].any():
            size = int(picture.owners[label][max(at, 0)])
            patches.append(Patch(color=colour, label=f"{label}  {format_bytes(size)}" if size else label))
    axes.legend(
        handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9,
        title="owner, bytes at the peak", title_fontsize=9, alignment="left",
    )  # fmt: skip


def legend_of_work(axes: Axes, pictures: list[Picture]) -> None:
    """What the colours of the compute lane mean; the other lanes carry their name."""
    from matplotlib.patches import Patch

    shown = {kind for picture in pictures for lane in picture.lanes[:1] for kind in lane.work}
    patches = [Patch(color=colour, label=kind) for kind, colour in WORK_COLOURS.items() if kind in shown]
    axes.legend(
        handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.1), frameon=False, fontsize=9,
        ncols=2 if len(patches) > 3 else 1, title="compute", title_fontsize=9, alignment="left",
        columnspacing=0.8, handlelength=1.2,
    )  # fmt: skip


def compare_figure(cells: Sequence[tuple[str, Picture]]) -> Figure:
    """Curves and lanes of several strategies, each under its title; on the same scales unless those lie far apart."""
    from matplotlib.figure import Figure

    columns = 1 if len(cells) < 3 else 2
    rows = -(-len(cells) // columns)
    height = rows * CELL_INCHES + 0.9
    figure = Figure(figsize=(6.2 * columns + 2.9, height), dpi=DPI)
    right = 1 - 2.75 / figure.get_figwidth()
    grid = figure.add_gridspec(rows, columns, left=1.05 / figure.get_figwidth(), right=right, top=1 - 0.35 / height,
                               bottom=0.55 / height, hspace=0.42, wspace=0.28)  # fmt: skip
    tops = shared_scales([top_bytes(picture) for _, picture in cells])
    lengths_ms = shared_scales([picture.step_ms for _, picture in cells])
    for number, (title, picture) in enumerate(cells):
        inner = grid[number // columns, number % columns].subgridspec(2, 1, height_ratios=(3.2, 1), hspace=0.08)
        memory_axes = figure.add_subplot(inner[0])
        lane_axes = figure.add_subplot(inner[1], sharex=memory_axes)
        draw_memory(memory_axes, picture, int(tops[number]), compact=True)
        draw_lanes(lane_axes, picture)
        memory_axes.set_xlim(0, lengths_ms[number])
        memory_axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
        memory_axes.tick_params(labelbottom=False)
        if number + columns >= len(cells):
            lane_axes.set_xlabel("ms from the start of the steady step")
    _legend_of_all(figure, [picture for _, picture in cells], right)
    return figure


def shared_scales(ends: Sequence[float]) -> list[float]:
    """The end of each axis: the largest, where no two are further apart than FAR_APART, else each its own."""
    return [max(ends)] * len(ends) if max(ends) <= FAR_APART * min(ends) else list(ends)


def _legend_of_all(figure: Figure, pictures: Sequence[Picture], left: float) -> None:
    """Colours of owners and of work, once for all cells."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    owned = {label for picture in pictures for label, curve in picture.owners.items() if curve.any()}
    worked = {kind for picture in pictures for lane in picture.lanes for kind in lane.work}
    owners: list[Artist] = [
        Patch(color=colour, label=label) for label, colour in reversed(STACK.items()) if label in owned
    ]
    owners.append(Line2D([], [], color="black", linestyle=(0, (1, 1)), label="reserved"))
    work = [
        Patch(color=colour, label=kind.replace("_", "-")) for kind, colour in WORK_COLOURS.items() if kind in worked
    ]
    look = {"frameon": False, "fontsize": 9, "title_fontsize": 9, "alignment": "left"}
    figure.legend(handles=owners, loc="upper left", bbox_to_anchor=(left, 1.0), title="owner", **look)
    height = figure.get_figheight()
    below = 1.0 - (0.5 + 0.2 * len(owners)) / height
    figure.legend(handles=work, loc="upper left", bbox_to_anchor=(left, below), title="work", **look)


def save(figure: Figure, file: BinaryIO, form: Literal["png", "svg"] = "png") -> None:
    """Write a figure. Signs that the font lacks are drawn as boxes, without a word on the console."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing from")
        figure.savefig(file, format=form)


def title_of(scenario: str, picture: Picture, headroom_bytes: int) -> str:
    """Scenario, strategy, step time, and whether it fits."""
    step = format_duration(picture.step_ms * 1e6)
    if picture.fits:
        return f"{scenario}, {picture.name}: step {step}, {format_bytes(max(headroom_bytes, 0))} left"
    short = f" ({format_bytes(-headroom_bytes)} short)" if headroom_bytes < 0 else ""
    return f"{scenario}, {picture.name}: does not fit{short}; what it would need"
