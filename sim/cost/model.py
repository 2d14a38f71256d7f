"""CostModel: how long does this kernel, copy or collective take alone, and under contention?

    model = CostModel.for_gpu(find_gpu("h100"))
    model.kernel_ns(Kernel("aten::mm", Gemm(m=8192, n=4096, k=4096)))

Durations are integer nanoseconds. Each distinct kernel is priced once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace

from sim.cost.attention import AttentionForm, AttentionTime, attention_root
from sim.cost.collective import CollectiveCost, CollectiveForm, Placement
from sim.cost.copy import HOST_LINK, CopyCost, Direction, HostLinks, copy_cost, host_figures, host_links
from sim.cost.figures import CostError, Figure, unknown
from sim.cost.gemm import GemmForm, GemmTime, gemm_root
from sim.cost.gpu import Gpu
from sim.cost.host import HostForm, load_framework
from sim.cost.measured import Timing
from sim.cost.memory import MemoryForm, MemoryTime, memory_root
from sim.cost.overlap import ALONE, LEVELS, OverlapForm
from sim.cost.own import own_profile_for
from sim.cost.profile import Profile, profile_for, with_gemm_efficiency
from sim.cost.uncertainty import attention_sigma, collective_sigma, gemm_sigma, memory_sigma
from sim.program.kernels import CPU_MEMORY, Attention, Collective, Fixed, Gemm, HostWork, Kernel, Memory, Operator, Work
from sim.scenario.names import is_own_profile

MIB = 1 << 20
KernelWork = Gemm | Attention | Memory | Operator
MEASURED_FORM = "measured"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a kernel takes its time: the form, what bounds it, its parts, and the figures behind it."""

    kernel: str
    form: str
    bound: str
    parts: dict[str, float | int]
    level_ns: tuple[int, ...]
    """Duration alone, beside a copy engine, beside a collective."""
    figures: dict[str, Figure]


@dataclass(slots=True)
class CostModel:
    """Prices for one GPU with one profile under one framework. Make it with `for_gpu`."""

    gpu: Gpu
    profile: Profile
    host: HostForm
    collectives: CollectiveForm
    overlap: OverlapForm
    attention_kernel: str | None = None
    """Generation that is timed where SDPA runs flash attention; None: flash2 as recorded."""
    _alone_ns: dict[Kernel, int] = field(default_factory=dict, repr=False)

    @classmethod
    def for_gpu(
        cls,
        gpu: Gpu,
        profile_name: str | None = None,
        framework: str = "eager",
        network_bytes_per_s: float | None = None,
        gemm_efficiency: float | None = None,
        attention_kernel: str | None = None,
    ) -> CostModel:
        """The model for `gpu`. `profile_name` None: the profile of this GPU, or one assumed from its datasheet; the path
        of a .yaml file: a profile of one's own, with the host times and the device that were measured.

        `network_bytes_per_s`: one GPU's line rate to other nodes, per direction (None: the usual node's).
        `gemm_efficiency`: the fraction of the dense peak that large matrix products sustain on one's own card, power
        limit and software (None: the profile's; its sigma says how far cards differ). `attention_kernel`: the kernel to
        time in place of SDPA's flash attention. Raises CostError (a ValueError) for a profile, framework or kernel
        that does not exist, listing those that do.
        """
        if profile_name is not None and is_own_profile(profile_name):
            profile = own_profile_for(gpu, profile_name)
        else:
            profile = profile_for(gpu, profile_name)
        gpu = profile.device or gpu
        if gemm_efficiency is not None:
            profile = with_gemm_efficiency(profile, gemm_efficiency)
        known = profile.figures.under("attention")
        if attention_kernel is not None and attention_kernel not in known:
            raise CostError(unknown("attention kernel", attention_kernel, known, where=profile.name))
        return cls(
            gpu=gpu,
            profile=profile,
            host=load_framework(framework).measured_as(profile.figures),
            collectives=CollectiveForm.of(profile.figures, gpu, network_bytes_per_s),
            overlap=OverlapForm.of(profile.figures, gpu),
            attention_kernel=attention_kernel,
        )

    def kernel_ns(self, kernel: Kernel) -> int:
        """Duration of `kernel` with the GPU to itself: as measured where this very work was, else by its form."""
        if kernel not in self._alone_ns:
            self._alone_ns[kernel] = self._price(kernel)
        return self._alone_ns[kernel]

    def _price(self, kernel: Kernel) -> int:
        work = kernel.work
        if isinstance(work, Fixed):
            return work.duration_ns
        timing = self.measured(kernel)
        return round(self._time(work, kernel.name).total_ns) if timing is None else timing.ns

    def measured(self, kernel: Kernel) -> Timing | None:
        """The time of this very work, where the profile is the user's own and has it."""
        if isinstance(kernel.work, Fixed):
            return None
        return self.profile.measured.find(kernel, self._run(kernel.work))

    def contended_ns(self, kernel: Kernel, level: int) -> int:
        """Duration at a contention level: 0 alone, 1 a copy engine is busy, 2 a collective runs on the same GPU."""
        return round(self.kernel_ns(kernel) * self.overlap.factor(kernel.work, level))

    def collective(self, collective: Collective, placement: Placement) -> CollectiveCost:
        """Latency and flow of a collective whose group lies as `placement` (a `Span` of the mesh) says."""
        cost = self.collectives.cost(collective, placement)
        timing = self.profile.measured.find_collective(collective) if placement.nodes == 1 else None
        return cost if timing is None else cost.lasting(timing.ns, self.collectives.fabric_bytes_per_s)

    def send(self, size_bytes: int, same_node: bool) -> CollectiveCost:
        """Latency and flow of a send and its recv."""
        return self.collectives.send(size_bytes, same_node)

    def copy(self, size_bytes: int, direction: Direction, pinned: bool = True) -> CopyCost:
        """Latency and flow of a copy between this GPU and its host."""
        return copy_cost(self.profile.figures, size_bytes, direction, pinned)

    def host_links(self, gpus_per_node: int) -> HostLinks:
        """What copies of one GPU share, with `gpus_per_node` of them copying alike."""
        return host_links(self.profile.figures, self.gpu, gpus_per_node)

    def uncertainty(self, work: Work, name: str = "") -> float:
        """Relative sigma of the time of `work` (of the kernel called `name`), from the spread between sources, or of the
        user's own rounds; 0 where the duration is given.

        It is shared by the kernels of a family, so over a step their errors add up: sum sigma * time by family.
        """
        if isinstance(work, Fixed):
            return 0.0
        if (timing := self.measured(Kernel(name, work))) is not None:
            return timing.relative_sigma
        figures, time = self.profile.figures, self._time(work, name)
        work = self._run(work)
        if isinstance(work, Gemm) and isinstance(time, GemmTime):
            return gemm_sigma(figures, work, time)
        if isinstance(work, Attention) and isinstance(time, AttentionTime):
            return attention_sigma(figures, work, time)
        assert isinstance(work, Memory) and isinstance(time, MemoryTime)
        return memory_sigma(figures, work, time, name)

    def collective_uncertainty(self, collective: Collective, placement: Placement) -> float:
        """Relative sigma of a collective's time alone."""
        cost = self.collective(collective, placement)
        return collective_sigma(self.profile.figures, collective, placement, cost)

    def copy_uncertainty(self, direction: Direction) -> float:
        """Relative sigma of a large copy's time."""
        return self.profile.figures.sigma(f"copy.{direction}_gb_per_s")

    def launch_host_ns(self, kernel: Kernel) -> int:
        """Host time of launching `kernel`. The same for every kernel of a framework."""
        return self.host.launch_ns

    def collective_host_ns(self, collective: Collective) -> int:
        """Host time of issuing `collective`."""
        return self.host.collective_ns

    def host_work_ns(self, work: HostWork, gpus_per_node: int = 1) -> int:
        """Host time of work that is no launch. An optimizer on the CPU shares the node's memory with those of the other
        `gpus_per_node`."""
        alone_ns = self.host.work_ns(work)
        if work.name != CPU_MEMORY:
            return alone_ns
        return max(alone_ns, round(work.count * MIB / self.host_links(gpus_per_node).step_bytes_per_s * 1e9))

    def driver_call_ns(self, kind: str) -> int:
        """Host time of one driver call: "cuda_malloc", "cuda_free", "map", "unmap", "cuda_host_alloc" or
        "synchronize"."""
        return self.host.driver_call_ns(kind)

    def explain(self, kernel: Kernel) -> Explanation:
        """The form's parts for `kernel`, with every figure that it used."""
        work = kernel.work
        levels = tuple(self.contended_ns(kernel, level) for level in LEVELS)
        if isinstance(work, Fixed):
            return Explanation(kernel.name, "fixed", "given", {"duration_ns": levels[ALONE]}, levels, {})
        if (timing := self.measured(kernel)) is not None:
            parts = {"measured_ns": timing.ns, "relative_spread": timing.relative_sigma}
            return Explanation(kernel.name, MEASURED_FORM, "measured here", parts, levels, {})
        time = self._time(work, kernel.name)
        parts = {f.name: getattr(time, f.name) for f in fields(time)}
        form, prefixes = self._form_name(self._run(work), kernel.name)
        prefixes = (*prefixes, "overlap.")
        used = {n: f for n, f in self.profile.figures if n.rpartition(".")[0] + "." in prefixes}
        return Explanation(kernel.name, form, time.bound, parts, levels, used)

    def labels(self) -> Iterator[tuple[str, Figure]]:
        """Every figure of this model by dotted name: the profile's, then the framework's under "host."."""
        own = dict(self.profile.figures)
        yield from ((name, figure) for name, figure in own.items() if not name.startswith("host."))
        for name, figure in self.host.figures:
            yield f"host.{name}", figure
        for name, figure in host_figures(self.gpu):
            if HOST_LINK + name not in own:
                yield HOST_LINK + name, figure

    def _time(self, work: KernelWork, name: str = "") -> GemmTime | AttentionTime | MemoryTime:
        figures, work = self.profile.figures, self._run(work)
        if isinstance(work, Operator):
            raise CostError(f"{work.name} on a CPU: no form prices it, and {self.profile.name} has no time of it")
        if isinstance(work, Gemm):
            return GemmForm.of(figures, self.gpu, work.dtype).time(work)
        if isinstance(work, Attention):
            return AttentionForm.of(figures, self.gpu, work).time(work)
        return MemoryForm.of(figures, self.gpu, work.family, name).time(work)

    def _run(self, work: KernelWork) -> KernelWork:
        """The work as the chosen attention kernel does it."""
        if isinstance(work, Attention) and work.generation == "flash2" and self.attention_kernel is not None:
            return replace(work, generation=self.attention_kernel)
        return work

    def _form_name(self, work: KernelWork, name: str) -> tuple[str, tuple[str, ...]]:
        """A form's name and the groups of figures that it reads."""
        figures = self.profile.figures
        if isinstance(work, Gemm):
            return "gemm", (f"{gemm_root(figures, work.dtype)}.",)
        if isinstance(work, Attention):
            root, head_dim = attention_root(figures, work)
            return "attention", (f"{root}.", f"{root}.d{head_dim}.")
        assert isinstance(work, Memory)  # an operator of a CPU has a time of its own, or none
        return f"memory: {work.family}", (f"{memory_root(figures, work.family, name)}.",)
