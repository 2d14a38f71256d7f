"""The device that is measured: how its time is taken, what it is. One interface for CPU and CUDA.

No CUDA path of this file has run on a real GPU (docs/calibration.md).
"""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from calibration.measure import ranks
from calibration.measure.needs_torch import torch
from calibration.measure.timing import Call
from calibration.measure.words import DEVICES, NO_CUDA, CalibrationError

GROUP_NS = 100_000
"""Calls on CUDA are timed in groups at least this long: an event's own time then does not count."""
MOST_IN_FLIGHT = 400
"""Calls between two waits for the device: a launch queue holds about 1,000 kernels."""
HEAD_START_CYCLES = 2_000_000
"""For which the device sleeps (about 1 ms) while the host issues, so that kernels run back to back."""
LOADING_SIDE = 64
CACHES_ROTATED = 2
"""Operands rotate through so many times the last cache."""
CPU_CACHE_BYTES = 32 << 20
"""Where the system does not tell the size of the last cache."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What was measured, for the profile. None: not known here."""

    kind: str
    title: str
    torch: str
    date: str
    threads: int
    sms: int
    memory_bytes: int
    cache_bytes: int
    driver: str | None = None
    capability: tuple[int, int] | None = None
    cuda: str | None = None
    clock_mhz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    devices: int = 1

    def as_dict(self) -> dict[str, Any]:
        """As JSON gives it back: without what is not known."""
        facts = {key: value for key, value in asdict(self).items() if value is not None}
        return facts if self.capability is None else {**facts, "capability": list(self.capability)}


class Device(Protocol):
    """A device on which cases are built and timed. `cold`: operands rotate through more than its last cache."""

    cold: bool

    @property
    def name(self) -> str:
        """cpu or cuda."""
        ...

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def rotation_bytes(self) -> int:
        """Through how much memory operands rotate; 0: the same in every call."""
        ...

    def synchronize(self) -> None: ...

    def time_ns(self, call: Call, rounds: int) -> list[float]: ...

    def free_bytes(self) -> int: ...

    def info(self) -> DeviceInfo: ...

    def state(self) -> dict[str, float]:
        """Clock and power at this moment, where the device tells."""
        ...

    def kernels(self, call: Call) -> list[str]:
        """Names of the kernels that a call runs, by torch.profiler; none on a CPU, where a case's name is its operator's."""
        ...


@dataclass(slots=True)
class CpuDevice:
    """The processor with a fixed number of threads."""

    threads: int = 0
    """0: as many as torch takes by itself."""
    cold: bool = True

    def __post_init__(self) -> None:
        self.threads = self.threads or torch.get_num_threads()
        torch.set_num_threads(self.threads)

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def rotation_bytes(self) -> int:
        return CACHES_ROTATED * last_cache_bytes() if self.cold else 0

    def synchronize(self) -> None:
        """A call that has returned is done."""

    def time_ns(self, call: Call, rounds: int) -> list[float]:
        times = []
        for _ in range(rounds):
            begin = time.perf_counter_ns()
            call()
            times.append(float(time.perf_counter_ns() - begin))
        return times

    def free_bytes(self) -> int:
        return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

    def info(self) -> DeviceInfo:
        return DeviceInfo(
            kind="cpu",
            title=_cpu_title(),
            torch=torch.__version__,
            date=today(),
            threads=self.threads,
            sms=self.threads,
            memory_bytes=int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
            cache_bytes=last_cache_bytes(),
        )

    def state(self) -> dict[str, float]:
        return {}

    def kernels(self, call: Call) -> list[str]:
        return []


@dataclass(slots=True)
class CudaDevice:
    """One GPU, timed by events. Operands always rotate: a training step finds the L2 cache full of something else."""

    index: int = 0
    cold: bool = True

    @property
    def name(self) -> str:
        return "cuda"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", self.index)

    @property
    def rotation_bytes(self) -> int:
        return CACHES_ROTATED * int(torch.cuda.get_device_properties(self.index).L2_cache_size)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def time_ns(self, call: Call, rounds: int) -> list[float]:
        """Groups of calls between two events; the host issues ahead while the device sleeps."""
        if rounds == 1:
            return [self._groups(call, 1, 1)[0]]
        once_ns = ranks.agreed(self._groups(call, 1, 1)[0])
        per_group = min(max(round(GROUP_NS / max(once_ns, 1.0)), 1), MOST_IN_FLIGHT)
        at_once = max(MOST_IN_FLIGHT // per_group, 1)
        times: list[float] = []
        while len(times) < rounds:
            times += self._groups(call, per_group, min(at_once, rounds - len(times)))
        return times

    def _groups(self, call: Call, per_group: int, groups: int) -> list[float]:
        events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(groups)]
        torch.cuda._sleep(HEAD_START_CYCLES)
        for begin, end in events:
            begin.record()
            for _ in range(per_group):
                call()
            end.record()
        self.synchronize()
        return [begin.elapsed_time(end) * 1e6 / per_group for begin, end in events]

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.index)
        return int(free) + torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index)

    def info(self) -> DeviceInfo:
        properties = torch.cuda.get_device_properties(self.index)
        asked = _nvidia_smi(_identity(self.index), "driver_version", "clocks.sm", "power.draw", "power.limit")
        return DeviceInfo(
            kind="cuda",
            title=properties.name,
            torch=torch.__version__,
            date=today(),
            threads=torch.get_num_threads(),
            sms=properties.multi_processor_count,
            memory_bytes=properties.total_memory,
            cache_bytes=properties.L2_cache_size,
            driver=asked.get("driver_version"),
            capability=(properties.major, properties.minor),
            cuda=torch.version.cuda,
            clock_mhz=_number(asked.get("clocks.sm")),
            power_w=_number(asked.get("power.draw")),
            power_limit_w=_number(asked.get("power.limit")),
            devices=torch.cuda.device_count(),
        )

    def state(self) -> dict[str, float]:
        asked = _nvidia_smi(_identity(self.index), "clocks.sm", "power.draw", "temperature.gpu")
        names = {"clocks.sm": "clock_mhz", "power.draw": "power_w", "temperature.gpu": "temperature_c"}
        found = {names[key]: _number(value) for key, value in asked.items()}
        return {key: value for key, value in found.items() if value is not None}

    def kernels(self, call: Call) -> list[str]:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            call()
            self.synchronize()
        device = torch.autograd.DeviceType.CUDA
        return list(dict.fromkeys(event.name for event in profiler.events() if event.device_type == device))


def open_device(name: str, threads: int = 0) -> Device:
    """The device of that name. Raises CalibrationError for one that does not exist or is not there."""
    if name == "cpu":
        return CpuDevice(threads)
    if name != "cuda":
        raise CalibrationError(f"--device {name}: one of {', '.join(DEVICES)}")
    if not torch.cuda.is_available():
        built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, no device answers"
        reason = built if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
        raise CalibrationError(NO_CUDA.format(reason=reason))
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(index)
    loaded = torch.ones(LOADING_SIDE, LOADING_SIDE, device="cuda")
    torch.mm(loaded, loaded)  # loads context and libraries, which no case should pay for
    torch.cuda.synchronize()
    return CudaDevice(index)


def last_cache_bytes() -> int:
    """Size of the processor's last cache."""
    names = [name for name in ("SC_LEVEL4_CACHE_SIZE", "SC_LEVEL3_CACHE_SIZE") if name in os.sysconf_names]
    return next((size for size in map(os.sysconf, names) if size > 0), CPU_CACHE_BYTES)


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _cpu_title() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _identity(index: int) -> str:
    """As nvidia-smi names a GPU, whichever of them CUDA_VISIBLE_DEVICES lets torch see."""
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return str(index) if uuid is None else f"GPU-{uuid}"


def _nvidia_smi(identity: str, *fields: str) -> dict[str, str]:
    """Fields of nvidia-smi; none where it is not there or does not answer."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", f"--id={identity}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (part.strip() for part in done.stdout.splitlines()[0].split(","))))


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None
