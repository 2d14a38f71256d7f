"""The error table as markdown, and the page docs/profiles.md."""

from __future__ import annotations

from calibration.fit.evidence import FamilyFit, Row
from calibration.fit.given import GIVEN
from sim.cost.profile import load_profile

HEAD = """# Cost profiles: how well the forms fit

Written by `python -m calibration.fit.all`; nothing here was fitted to a whole step.

Errors are |predicted / measured - 1|, median / 90th percentile. *Held out*: half of the points of the same source,
chosen by a seeded generator (collectives: every other size), fitted to the other half; the figures that ship are then
refitted to all points. *Other source*: nothing refitted, so these are what to expect on one's own machine. "m/p" is
the median of measured / predicted: one measured rate per card removes it. COSTS.md is the project's page of earlier
fits to the same files; where its errors lie on other held-out points, its parameters are scored on these points too.

The rate that ships for matrix products weighs all sources and is kept beside the rate of the single source
(`single_source.` in a profile); the spread of the sources around it is its `sigma`, which `CostModel.uncertainty`
turns into the relative sigma of a duration.

Forms that changed against COSTS.md, by held-out error: attention adds the bytes moved and a tail of uneven tiles
(instead of the larger of the two, and a fixed number of keys per tile); written-out attention pays 1.6-1.7 for a
masked key; embeddings get a share of bandwidth of their own (.14-.18, not that of elementwise kernels).

Attention of B200 ships what SimuMax measured of Transformer Engine's kernels, forward and backward, up to 131,072
tokens: over tens of milliseconds clocks settle at .50 of the peak, where prefill kernels of a server reach .645. It has
heads of 192/128 entries (latent attention) too; where nobody measured these (H100, GB200), the ratio carries over.

Products in 8 bit: a measured layer is a pass that quantises and a product; the product starts and moves bytes as one in
16 bit does, what is left is the pass's (a kernel of its own in a simulation), and the rate is moved as the shipped one of
16 bit is from its file. On Blackwell 8 and 4 bit are 1.75 and 3.42 times the card's rate in 16 bit, as Transformer Engine's
guide to products has it of B300; the file of GB200, of an inference server's kernels, is kept for the table only.
"""

PICTURED = ("gemm", "attention", "collectives")
"""Families whose plot is kept in docs/img."""


def as_markdown(rows: list[Row]) -> str:
    """One table."""
    lines = ["| profile | rows | kind | n | error | m/p | COSTS.md |", "|-|-|-|-|-|-|-|"]
    for row in rows:
        e = row.errors
        lines.append(f"| {row.profile} | {row.what} | {row.kind} | {e.count} | {e} | {e.scale:.2f} | {row.costs} |")
    return "\n".join(lines)


def page(results: list[FamilyFit]) -> str:
    """docs/profiles.md."""
    parts = [HEAD, "## Profiles\n\n" + _profiles()]
    for result in results:
        if not result.rows:
            continue
        parts.append(f"## {result.family.capitalize()}\n\n{as_markdown(result.rows)}")
        if result.family in PICTURED:
            parts.append(f"![{result.family}: measured over predicted time](img/{result.family}.png)")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _profiles() -> str:
    """Sustained rates and labels by profile."""
    lines = ["| profile | like | GEMM rate shipped | sigma | single source | labels |", "|-|-|-|-|-|-|"]
    for name, entry in GIVEN.items():
        figures = load_profile(name).figures
        single = figures.single_source()["gemm.efficiency"]
        alone = f"{single:g}" if "single_source.gemm.efficiency" in figures else ""
        labels = [figure.label for _, figure in figures]
        counts = ", ".join(f"{labels.count(label)} {label}" for label in dict.fromkeys(sorted(labels)))
        rate = figures["gemm.efficiency"]
        sigma = figures.sigma("gemm.efficiency")
        lines.append(f"| {name} | {entry.get('like', '')} | {rate:g} | {sigma:.2f} | {alone} | {counts} |")
    return "\n".join(lines)
