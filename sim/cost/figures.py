"""A figure of a cost profile: its value, how far to trust it, and who says so."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

Label = Literal["measured", "published", "scaled", "assumed"]
"""measured: on the user's own device; published: from somebody's measurements of this GPU; scaled: published for
another GPU and carried over by a stated rule; assumed: nobody's measurement."""
LABELS: tuple[str, ...] = get_args(Label)


class CostError(ValueError):
    """A cost profile cannot be found, read, or used; the message says what would be allowed."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number. `source`: who measured it or why it is assumed; `error`: the fit error, where a fit was made."""

    value: float
    label: Label
    source: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures by dotted name, e.g. "gemm.efficiency". The unit stands at the end of a name; fractions have none."""

    owner: str
    by_name: Mapping[str, Figure]

    def __getitem__(self, name: str) -> float:
        """Value of a figure. Raises CostError, naming the nearest figure, when there is none."""
        try:
            return self.by_name[name].value
        except KeyError:
            raise CostError(unknown("figure", name, self.by_name, where=self.owner)) from None

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    def __iter__(self) -> Iterator[tuple[str, Figure]]:
        return iter(self.by_name.items())

    def under(self, prefix: str) -> list[str]:
        """Next parts of the names that start with `prefix`: under("memory") lists the families."""
        start = prefix + "."
        return list(dict.fromkeys(n[len(start) :].split(".")[0] for n in self.by_name if n.startswith(start)))

    def overlaid(self, owner: str, own: Mapping[str, Figure], was: str) -> Figures:
        """These figures carried over from `was` to another GPU, with that one's `own` on top."""
        carried = {name: carry(figure, was) for name, figure in self.by_name.items()}
        return Figures(owner, {**carried, **own})


def carry(figure: Figure, was: str) -> Figure:
    """The figure as evidence about another GPU: published and measured become scaled; a fit error no longer holds."""
    label: Label = "assumed" if figure.label == "assumed" else "scaled"
    return replace(figure, label=label, source=f"as {was}: {figure.source}", error="")


def unknown(kind: str, name: str, known: Iterable[str], where: str = "") -> str:
    """Message for a name that does not exist: lists what does, nearest first if one is near."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]}?)" if near else ""
    place = f" in {where}" if where else ""
    return f"{kind} {name!r}{place}: one of {', '.join(names)}{hint}"
