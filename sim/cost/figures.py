"""A figure of a cost profile: its value, how far to trust it, and who says so."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import hypot
from typing import Literal, get_args

Label = Literal["measured", "published", "scaled", "assumed"]
"""measured: on the user's own device; published: from somebody's measurements of this GPU; scaled: published for
another GPU and carried over by a stated rule; assumed: nobody's measurement."""
LABELS: tuple[str, ...] = get_args(Label)

SIGMA_BY_LABEL: Mapping[Label, float] = {"measured": 0.05, "published": 0.10, "scaled": 0.15, "assumed": 0.30}
"""Relative uncertainty of a figure that states none. Assumed: sources of one GPU differ by 4-15 % on most sets of
kernels and by 14-25 % on others (COSTS.md 1.3)."""
CARRIED_SIGMA = 0.15
"""What carrying a figure to another GPU adds, in quadrature: absolute rates transfer to about 15 % (COSTS.md 1.3)."""
SINGLE_SOURCE = "single_source."
"""Under this prefix a profile keeps what one source alone gives, where the figure used weighs several."""


class CostError(ValueError):
    """A cost profile cannot be found, read, or used; the message says what would be allowed."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number. `source`: who measured it or why it is assumed; `error`: the fit error, median/p90 over held-out
    points, where a fit was made; `sigma`: relative uncertainty, the spread between sources (None: by label)."""

    value: float
    label: Label
    source: str
    error: str = ""
    sigma: float | None = None

    @property
    def relative_sigma(self) -> float:
        """The stated uncertainty, else the label's."""
        return SIGMA_BY_LABEL[self.label] if self.sigma is None else self.sigma


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures by dotted name, e.g. "gemm.efficiency". The unit stands at the end of a name; fractions have none."""

    owner: str
    by_name: Mapping[str, Figure]
    _parts: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __getitem__(self, name: str) -> float:
        """Value of a figure. Raises CostError, naming the nearest figure, when there is none."""
        try:
            return self.by_name[name].value
        except KeyError:
            raise CostError(unknown("figure", name, self.by_name, where=self.owner)) from None

    def get(self, name: str, default: float) -> float:
        """Value of a figure that a profile may leave out."""
        return self.by_name[name].value if name in self.by_name else default

    def sigma(self, name: str) -> float:
        """Relative uncertainty of a figure; 0 for one left out."""
        return self.by_name[name].relative_sigma if name in self.by_name else 0.0

    def single_source(self) -> Figures:
        """These figures with those of a single source instead, where they differ."""
        alone = {n.removeprefix(SINGLE_SOURCE): f for n, f in self.by_name.items() if n.startswith(SINGLE_SOURCE)}
        return Figures(self.owner, {**self.by_name, **alone})

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    def __iter__(self) -> Iterator[tuple[str, Figure]]:
        return iter(self.by_name.items())

    def under(self, prefix: str) -> tuple[str, ...]:
        """Next parts of the names that start with `prefix`: under("memory") lists the families."""
        if prefix not in self._parts:
            start = prefix + "."
            parts = (n[len(start) :].split(".")[0] for n in self.by_name if n.startswith(start))
            self._parts[prefix] = tuple(dict.fromkeys(parts))
        return self._parts[prefix]

    def overlaid(self, owner: str, own: Mapping[str, Figure], was: str, added_sigma: float = CARRIED_SIGMA) -> Figures:
        """These figures carried over from `was` to another GPU, with that one's `own` on top.

        Figures of a single source stay behind: they are evidence about the GPU that was measured.
        """
        carried = {
            name: carry(figure, was, added_sigma)
            for name, figure in self.by_name.items()
            if not name.startswith(SINGLE_SOURCE)
        }
        return Figures(owner, {**carried, **own})


def carry(figure: Figure, was: str, added_sigma: float = CARRIED_SIGMA) -> Figure:
    """The figure as evidence about another GPU: published and measured become scaled, the uncertainty grows and a fit
    error no longer holds."""
    label: Label = "assumed" if figure.label == "assumed" else "scaled"
    sigma = None if figure.sigma is None else round(hypot(figure.sigma, added_sigma), 3)
    return replace(figure, label=label, source=f"as {was}: {figure.source}", error="", sigma=sigma)


def unknown(kind: str, name: str, known: Iterable[str], where: str = "") -> str:
    """Message for a name that does not exist: lists what does, nearest first if one is near."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]}?)" if near else ""
    place = f" in {where}" if where else ""
    return f"{kind} {name!r}{place}: one of {', '.join(names)}{hint}"
