"""Host time: what the training thread spends per launch, collective, piece of Python and driver call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from sim.cost.figures import CostError, Figure, Figures, unknown
from sim.cost.profile import flatten, read_yaml
from sim.program.kernels import HostWork

MEASURED_FRAMEWORK, NO_HOST = "eager", "none"


@dataclass(frozen=True, slots=True)
class HostForm:
    """One framework's host times (`frameworks.yaml`) and the driver's (`driver.yaml`)."""

    framework: str
    description: str
    figures: Figures

    @property
    def launch_ns(self) -> int:
        """Issuing one op: Python, dispatch, autograd, cuLaunchKernel."""
        return self._ns("launch_us")

    @property
    def collective_ns(self) -> int:
        """Issuing one collective."""
        return self._ns("collective_us")

    @property
    def event_ns(self) -> int:
        """Recording an event, or making a stream wait for one."""
        return self._ns("event_us")

    def measured_as(self, figures: Figures) -> HostForm:
        """With the host times among a profile's own figures: the driver's for every framework; those of launches and
        Python, which were measured in eager mode, for that one."""
        prefix = "host." if self.framework == MEASURED_FRAMEWORK else "host.driver."
        own = {name.removeprefix("host."): figure for name, figure in figures if name.startswith(prefix)}
        if not own or self.framework == NO_HOST:
            return self
        return replace(self, figures=Figures(self.framework, {**self.figures.by_name, **own}))

    def work_ns(self, work: HostWork) -> int:
        """`work.count` times the named work or driver call. Raises CostError for a name without a figure."""
        if f"driver.{work.name}_us" in self.figures:
            return work.count * self.driver_call_ns(work.name)
        return work.count * self._one_of("host work", "work", work.name)

    def driver_call_ns(self, kind: str) -> int:
        """One driver call, e.g. "cuda_malloc". Raises CostError for a kind without a figure."""
        return self._one_of("driver call", "driver", kind)

    def _one_of(self, kind: str, group: str, name: str) -> int:
        known = [known_name.removesuffix("_us") for known_name in self.figures.under(group)]
        if name not in known:
            raise CostError(unknown(kind, name, known))
        return self._ns(f"{group}.{name}_us")

    def _ns(self, name: str) -> int:
        return round(self.figures[name] * 1000)


def framework_names() -> list[str]:
    return sorted(read_yaml("frameworks.yaml"))


@cache
def load_framework(name: str) -> HostForm:
    """Host times of a framework. Raises CostError for an unknown name."""
    frameworks = read_yaml("frameworks.yaml")
    if name not in frameworks:
        raise CostError(unknown("framework", name, frameworks))
    entry = dict(frameworks[name])
    description, like = entry.pop("description"), entry.pop("like", None)
    base: Iterable[tuple[str, Figure]] = load_framework(like).figures if like else flatten("driver", driver())
    return HostForm(name, description, Figures(name, {**dict(base), **dict(flatten(name, entry))}))


def driver() -> dict[str, object]:
    """The driver's figures as a group named "driver"."""
    return {"driver": read_yaml("driver.yaml")}
