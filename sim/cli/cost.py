"""The verbs under `sim cost`: one kernel, collective or copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from sim.cli.errors import answers_errors

if TYPE_CHECKING:
    from sim.program.kernels import Work

cost = typer.Typer(help="How long does one kernel, collective or copy take, and why?", no_args_is_help=True)
OnGpu = Annotated[str, typer.Option("--gpu", help="GPU by name or alias.")]
WithProfile = Annotated[str | None, typer.Option("--profile", help="Cost profile (default: the GPU's own).")]
Count = Annotated[int, typer.Argument(min=1)]
OfDtype = Annotated[str, typer.Option("--dtype", help="bf16, fp16, fp32 or fp8.")]


@cost.command()
def gemm(
    m: Count,
    n: Count,
    k: Count,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    dtype: OfDtype = "bf16",
    gpu: OnGpu = "h100-sxm",
    profile: WithProfile = None,
) -> None:
    """C[m, n] = A[m, k] B[k, n].

    Example: python -m sim cost gemm 8192 4096 14336 --gpu h100-sxm
    """
    from sim.program.kernels import Gemm

    _price_kernel(lambda: Gemm(m, n, k, dtype, batch), gpu, profile)


@cost.command()
def attention(
    batch: Count, heads: Count, kv_heads: Count, seq_len: Count, head_dim: Count, backward: bool = False, causal: bool = True,
    generation: str = "flash2", gpu: OnGpu = "h100-sxm", profile: WithProfile = None,
) -> None:  # fmt: skip
    """A fused attention kernel.

    Example: python -m sim cost attention 1 32 8 8192 128 --backward
    """
    from sim.program.kernels import Attention

    def work() -> Attention:
        return Attention(batch, heads, kv_heads, seq_len, seq_len, head_dim, causal, backward, generation)

    _price_kernel(work, gpu, profile)


@cost.command()
def memory(family: str, size: str, gpu: OnGpu = "h100-sxm", profile: WithProfile = None) -> None:
    """A memory-bound kernel that moves SIZE bytes (reads and writes).

    Example: python -m sim cost memory elementwise "192 MiB"
    """
    from sim.program.kernels import Memory
    from sim.units import parse_bytes

    _price_kernel(lambda: Memory(family, parse_bytes(size)), gpu, profile)


@cost.command()
def collective(
    kind: str,
    size: str,
    ranks: Annotated[int, typer.Option(min=1)] = 8,
    gpus_per_node: Annotated[int, typer.Option(min=1)] = 8,
    gpu: OnGpu = "h100-sxm",
    profile: WithProfile = None,
) -> None:
    """A collective over RANKS GPUs; SIZE is the full buffer.

    Example: python -m sim cost collective all_gather "416 MiB" --ranks 16
    """
    from typing import cast

    from sim.cost.listing import ask_collective
    from sim.hardware.mesh import Mesh
    from sim.program.kernels import Collective, CollectiveKind
    from sim.report.costs import transfer_table
    from sim.report.questions import cost_of, print_table
    from sim.units import parse_bytes

    with answers_errors():
        work = Collective(cast("CollectiveKind", kind), parse_bytes(size), "group", ranks)
        placement = Mesh((("group", ranks),), gpus_per_node, ranks).span("group")
        print_table(transfer_table(ask_collective(cost_of(gpu, profile), work, placement)))


@cost.command()
def copy(
    size: str, to_host: bool = False, pinned: bool = True, gpu: OnGpu = "h100-sxm", profile: WithProfile = None
) -> None:
    """A copy between a GPU and its host.

    Example: python -m sim cost copy "64 MiB" --to-host
    """
    from sim.cost.listing import ask_copy
    from sim.report.costs import transfer_table
    from sim.report.questions import cost_of, print_table
    from sim.units import parse_bytes

    with answers_errors():
        model, size_bytes = cost_of(gpu, profile), parse_bytes(size)
        print_table(
            transfer_table(ask_copy(model, size_bytes, "device_to_host" if to_host else "host_to_device", pinned))
        )


def _price_kernel(work: Callable[[], Work], gpu: str, profile: str | None) -> None:
    from sim.cost.listing import ask_kernel
    from sim.report.costs import kernel_table
    from sim.report.questions import cost_of, print_table

    with answers_errors():
        print_table(kernel_table(ask_kernel(cost_of(gpu, profile), work())))
