"""What the engine costs: `python -m benchmarks.engine [cases]`, best of three runs per case.

Durations and bandwidths are invented; only speed is measured here. `--naive` also plays the one-event-per-kernel
reference of the property tests, which takes seconds per case.

    a  FSDP on one rank: 32 layers of 60 kernels forward and backward, gathers and reduce-scatters on two more streams
    b  1F1B, 8 stages, 64 micro-batches, 720 kernels per stage and micro-batch, sends and recvs that contend
    d  8 GPUs offload activations over PCIe into one host memory, one or ten copies per layer
    e  bursts of 1 to 240 kernels with a record and a cross-stream wait after each
    c  1F1B, 64 stages, 512 micro-batches (4 million kernels, 1 GB; only on demand)
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from sim.engine.play import play
from sim.program.world import BURST, Meeting, World
from sim.program.world_builder import WorldBuilder
from sim.timeline.expand import expand

US = 1_000  # ns


@dataclass(frozen=True, slots=True)
class Kernels:
    """A table of kernels with random durations; contended ones take a fifth longer."""

    kernel_ns: np.ndarray  # [2, kernels]
    launch_ns: np.ndarray  # [kernels]

    @classmethod
    def random(cls, count: int, mean_ns: int = 100 * US, launch_ns: int = 5 * US) -> Kernels:
        alone = np.random.default_rng(count).integers(mean_ns // 5, mean_ns * 9 // 5, count)
        return cls(np.stack([alone, alone * 6 // 5]), np.full(count, launch_ns))


def fsdp(layers: int = 32, per_layer: int = 60) -> World:
    table = Kernels.random(2 * per_layer)
    builder = WorldBuilder([3], table.kernel_ns, table.launch_ns, [300.0])
    compute, gathers, scatters = range(3)
    gather = Meeting(
        parties=((0, gathers),),
        bytes=400_000_000,
        links=(0,),
        latency_ns=20 * US,
        cap_bytes_per_ns=200.0,
        slow=0.9,
        level=1,
    )
    scatter = replace(gather, parties=((0, scatters),), bytes=800_000_000)

    def gathered() -> int:
        builder.meet(0, gathers, gather, 10 * US)
        return builder.record(0, gathers, US)

    for backward in (False, True):
        kernels = range(per_layer * backward, per_layer * (1 + backward))
        ready = gathered()
        for layer in range(layers):
            following = gathered() if layer + 1 < layers else ready
            builder.wait(0, compute, ready, US)
            builder.launches(0, compute, kernels)
            done = builder.record(0, compute, US)
            builder.wait(0, scatters if backward else gathers, done, US)
            if backward:
                builder.meet(0, scatters, scatter, 10 * US)
                reduced = builder.record(0, scatters, US)
            ready = following
    builder.wait(0, compute, reduced, US)
    builder.sync(0, builder.record(0, compute, US))
    return builder.build()


def one_f_one_b(
    stages: int = 8,
    micro_batches: int = 64,
    per_stage: int = 720,
    piece: int = 240,
    mean_ns: int = 400 * US,
    launch_ns: int = 5 * US,
    tensor_parallel_meetings: bool = False,
) -> World:
    """Send and recv have a stream per direction: compute waits for recv, send waits for compute. Tensor-parallel
    collectives are rows of a burst, or meetings of one party after every `piece` kernels."""
    table = Kernels.random(per_stage, mean_ns, launch_ns)
    nics, nvlinks = [50.0] * (2 * stages), [300.0] * stages
    builder = WorldBuilder([6] * stages, table.kernel_ns, table.launch_ns, nics + nvlinks)
    compute, send_activation, recv_activation, send_gradient, recv_gradient, tensor_parallel = range(6)

    def transfer(sender: int, receiver: int, send: int, recv: int) -> Meeting:
        return Meeting(
            parties=((sender, send), (receiver, recv)),
            bytes=50_000_000,
            links=(2 * sender, 2 * receiver + 1),
            latency_ns=15 * US,
            cap_bytes_per_ns=40.0,
            slow=0.95,
            level=1,
        )

    forward_to = [transfer(r, r + 1, send_activation, recv_activation) for r in range(stages - 1)]
    backward_to = [transfer(r + 1, r, send_gradient, recv_gradient) for r in range(stages - 1)]

    def compute_pieces(rank: int, first: int, last: int) -> None:
        for start in range(first, last, piece):
            builder.launches(rank, compute, range(start, min(start + piece, last)))
            builder.end_burst(rank)
            if tensor_parallel_meetings:
                builder.wait(rank, tensor_parallel, builder.record(rank, compute, US), US)
                all_reduce = Meeting(
                    parties=((rank, tensor_parallel),),
                    bytes=50_000_000,
                    links=(2 * stages + rank,),
                    latency_ns=20 * US,
                    cap_bytes_per_ns=200.0,
                    level=1,
                )
                builder.meet(rank, tensor_parallel, all_reduce, 5 * US)
                builder.wait(rank, compute, builder.record(rank, tensor_parallel, US), US)

    def receive(rank: int, stream: int, meeting: Meeting) -> None:
        builder.meet(rank, stream, meeting, 5 * US)
        builder.wait(rank, compute, builder.record(rank, stream, US), US)

    def send(rank: int, stream: int, meeting: Meeting) -> None:
        builder.wait(rank, stream, builder.record(rank, compute, US), US)
        builder.meet(rank, stream, meeting, 5 * US)

    for rank in range(stages):
        for forward in _one_f_one_b_order(stages - rank, micro_batches):
            if forward:
                if rank > 0:
                    receive(rank, recv_activation, forward_to[rank - 1])
                compute_pieces(rank, 0, per_stage // 3)
                if rank + 1 < stages:
                    send(rank, send_activation, forward_to[rank])
            else:
                if rank + 1 < stages:
                    receive(rank, recv_gradient, backward_to[rank])
                compute_pieces(rank, per_stage // 3, per_stage)
                if rank > 0:
                    send(rank, send_gradient, backward_to[rank - 1])
        builder.sync(rank, builder.record(rank, compute, US))
    return builder.build()


def _one_f_one_b_order(warmup: int, micro_batches: int) -> list[bool]:
    """True for a forward, False for a backward."""
    warmup = min(warmup, micro_batches)
    return [True] * warmup + [False, True] * (micro_batches - warmup) + [False] * warmup


def offload(gpus: int = 8, layers: int = 32, per_layer: int = 60, copies: int = 10) -> World:
    part = per_layer // copies
    table = Kernels.random(2 * part)
    builder = WorldBuilder([3] * gpus, table.kernel_ns, table.launch_ns, [25.0] * (2 * gpus) + [45.0])
    compute, down, up = range(3)
    for rank in range(gpus):
        to_host, to_device = (
            Meeting(parties=((rank, stream),), bytes=33_000_000, links=(link, 2 * gpus), latency_ns=10 * US, level=1)
            for stream, link in ((down, 2 * rank), (up, 2 * rank + 1))
        )
        builder.host(rank, rank * 37 * US)
        for _ in range(layers * copies):
            builder.launches(rank, compute, range(part))
            builder.wait(rank, down, builder.record(rank, compute, US), US)
            builder.meet(rank, down, to_host, 5 * US)
        for _ in range(layers * copies):
            builder.meet(rank, up, to_device, 5 * US)
            builder.wait(rank, compute, builder.record(rank, up, US), US)
            builder.launches(rank, compute, range(part, 2 * part))
        builder.sync(rank, builder.record(rank, compute, US))
    return builder.build()


def chopped(per_burst: int, kernels: int = 100_000) -> World:
    table = Kernels.random(per_burst)
    builder = WorldBuilder([2], table.kernel_ns, table.launch_ns)
    for _ in range(kernels // per_burst):
        builder.launches(0, 0, range(per_burst))
        builder.wait(0, 1, builder.record(0, 0, US), US)
    return builder.build()


def jittered(world: World, sigma: float = 0.02) -> World:
    """A factor of its own for every burst."""
    rng = np.random.default_rng(0)
    ranks = [replace(program, scale=rng.lognormal(0, sigma, len(program.kind))) for program in world.ranks]
    return replace(world, ranks=ranks)


CASES: dict[str, list[tuple[str, Callable[[], World]]]] = {
    "a": [("FSDP 32 x 60", fsdp)],
    "b": [
        ("1F1B 8 x 64 x 720", one_f_one_b),
        ("... jitter per burst", lambda: jittered(one_f_one_b())),
        ("... host-bound", lambda: one_f_one_b(mean_ns=6 * US, launch_ns=12 * US)),
        ("... TP as meetings", lambda: one_f_one_b(piece=20, tensor_parallel_meetings=True)),
    ],
    "d": [
        ("offload, 1 copy per layer", lambda: offload(copies=1)),
        ("offload, 10 copies per layer", offload),
    ],
    "e": [(f"bursts of {size}", lambda size=size: chopped(size)) for size in (1, 5, 20, 60, 240)],
    "c": [("1F1B 64 x 512 x 120", lambda: one_f_one_b(64, 512, 120, 120))],
}


def best_of(times: int, call: Callable[[], object]) -> float:
    """Seconds of the fastest call."""
    best = float("inf")
    for _ in range(times):
        gc.collect()
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


def report(case: str, name: str, build: Callable[[], World], naive: bool) -> None:
    started = time.perf_counter()
    world = build()
    build_s = time.perf_counter() - started
    sizes = np.array([burst.size for burst in world.bursts])
    kernels = sum(int(sizes[program.argument[program.kind == BURST]].sum()) for program in world.ranks)
    rows = sum(len(program.kind) for program in world.ranks)
    play_s = best_of(3, lambda: play(world))
    played = play(world)
    expand_s = best_of(3, lambda: [expand(world, played, rank) for rank in range(len(world.ranks))])
    line = (
        f"{case} {name:30s} {kernels:9,d} kernels {rows:8,d} rows  step {played.end_ns / 1e9:7.3f} s  "
        f"build {build_s:6.3f}  play {play_s:6.3f}  expand {expand_s:6.3f} s  "
        f"{kernels / (play_s + expand_s) / 1e6:6.2f} M kernels/s"
    )
    if naive:
        from tests.property.naive_engine import NaiveEngine

        naive_s = best_of(1, lambda: NaiveEngine(world).play())
        line += f"  naive {naive_s:6.2f} s, x {naive_s / (play_s + expand_s):.0f}"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="?", default="abde", help="letters of the cases to run")
    parser.add_argument("--naive", action="store_true", help="also play the naive reference")
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(sorted(CASES))}")
    for case in arguments.cases:
        for name, build in CASES[case]:
            report(case, name, build, arguments.naive)


if __name__ == "__main__":
    main()
