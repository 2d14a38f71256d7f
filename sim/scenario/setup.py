"""A resolved scenario: one `Setup` per strategy, complete, checked, without defaults left to guess."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sim.hardware.catalogue import Cluster
from sim.hardware.mesh import Mesh
from sim.model.config import ChainConfig, ModelConfig
from sim.model.experts import ExpertParallel
from sim.model.shard.context import ContextParallel
from sim.model.shard.tensor import TensorParallel
from sim.scenario.parallel import DataParallel, Ddp, Fsdp, Fsdp1, Pipeline, Zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """micro_batch sequences of seq_len tokens per rank and micro-batch; `accumulation` micro-batches per step.

    `tokens`: new token ids for every micro-batch, or one set per step (used again by each micro-batch).
    """

    micro_batch: int
    seq_len: int
    target_len: int = 0
    """Tokens per target sequence of an encoder-decoder."""
    accumulation: int = 1
    tokens: Literal["per_micro_batch", "per_step"] = "per_micro_batch"

    @property
    def tokens_per_sequence(self) -> int:
        """Of source and target together."""
        return self.seq_len + self.target_len


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes of stored parameters, of compute, of gradient reduction. `autocast`: torch.autocast instead of casting
    parameters (single GPU with fp32 parameters, or asked for under FSDP)."""

    parameters: str = "fp32"
    compute: str = "bf16"
    reduce: str = "fp32"
    autocast: bool = False
    grad_scaler: bool = False
    """The loss is scaled, gradients are unscaled and checked before the step (torch.amp.GradScaler)."""
    float8: str | None = None
    """Scales of 8-bit products in the blocks' linear layers: tensorwise or rowwise; None: products in `compute`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """AdamW and SGD as torch.optim runs them, 8-bit AdamW as bitsandbytes does; clip_norm None = no clipping; zero_grad
    at the "end" or "start" of a step; in_backward: each parameter is stepped, and its gradient freed, inside backward."""

    name: Literal["adamw", "adamw-8bit", "sgd"] = "adamw"
    variant: Literal["fused", "foreach", "for-loop"] = "fused"
    momentum: float = 0.0
    master_weights: bool = False
    """fp32 copies of 16-bit parameters are what is stepped (Megatron, apex O2)."""
    fp32_gradients: bool = False
    """Their gradients stay, and 16-bit ones beside them (DeepSpeed's BF16_Optimizer)."""
    in_backward: bool = False
    offload: Literal["states", "gradients"] | None = None
    """What of it is in host memory, where the CPU steps (torchao's CPUOffloadOptimizer)."""
    clip_norm: float | None = 1.0
    zero_grad: Literal["start", "end"] = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """How one layer (or run of layers) is checkpointed by torch.utils.checkpoint.

    `save`: operators whose outputs are kept instead of recomputed: "attention", "every_second_matmul", or aten names
    such as "aten.mm"; empty = recompute everything. `inside`: parts of the layer that are regions of their own instead
    of the layer (names in sim.model.parts). `discard`: parts whose output is thrown away after the module that reads it
    has run, and made again before that module's backward (Megatron's "layernorm" and "moe_act"). `early_stop`:
    recomputation ends at the last needed tensor; the `reentrant` form knows neither early stop nor `save`.
    """

    save: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    discard: tuple[str, ...] = ()
    early_stop: bool = True
    reentrant: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Region):
    """Activation checkpointing of a network: which layers become regions, and how each is checkpointed.

    One of five forms decides the regions:
    - `every`, `segment`, `first`: a region wraps `segment` consecutive layers; of the regions every `every`-th is
      checkpointed (every=2: layers 1, 3, 5, ... as torchtitan's selective "2"; 0, 2, 4, ... as transformers'
      every_n_layers where its code is imitated), and only those that lie within the `first` layers (None: all);
    - `sequential`: checkpoint_sequential with so many segments, of which the last is not checkpointed;
    - `nested`: counts per level: (2, 3) makes 2 regions, each of 3 regions, of layers as equal as possible in number;
    - `boundaries`: the layers that begin a new region; the first region begins at layer 0;
    - `layers`: one choice per layer, None: not checkpointed.
    """

    every: int = 1
    segment: int = 1
    first: int | None = None
    sequential: int | None = None
    nested: tuple[int, ...] = ()
    boundaries: tuple[int, ...] = ()
    layers: tuple[Region | None, ...] = ()
    keep_micro_batches: int = 0
    """Of those in flight in a pipeline stage, so many are not recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compile:
    """torch.compile of each block by Inductor, checkpointing inside, FSDP outside; `loss`: of the loss too."""

    loss: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Saved tensors that wait for backward in host memory.

    `what`: "saved_tensors" is torch.autograd.graph.save_on_cpu (every saved tensor, weights and duplicates too),
    "checkpoint_inputs" what checkpointed regions keep, "activations" saved tensors other than parameters and buffers,
    "stage_activations" those of a micro-batch in a pipeline stage as one bundle, of whose bytes a `share` leaves.
    `layers`: which (None: the whole forward, loss and all). `streams`: copies run on the compute stream, as
    save_on_cpu's, or on side streams of their own. For side streams: `look_ahead` layers are fetched before backward
    reaches them (0: each tensor when it is asked for), tensors below `above_bytes` stay; with `release` "events"
    `in_flight` tensors leave at a time, with "record_stream" as many as there are. `pinned_pool`: pinned blocks are kept
    and used again, as PyTorch does; else every tensor is pinned anew.
    """

    what: Literal["saved_tensors", "checkpoint_inputs", "activations", "stage_activations"]
    share: float = 1.0
    layers: tuple[int, ...] | None = None
    pinned: bool = True
    pinned_pool: bool = True
    streams: Literal["compute", "side"] = "compute"
    look_ahead: int = 1
    in_flight: int = 5
    release: Literal["events", "record_stream"] = "events"
    above_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The script's thread. `framework` names the host-cost profile; `sync`: where the loop waits for the GPU."""

    framework: str = "eager"
    sync: tuple[Literal["loss", "clip"], ...] = ("loss",)
    launch_blocking: bool = False
    """It waits for everything that it launches."""


Mode = Literal["train", "eval", "no_grad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything that one strategy's simulation needs."""

    name: str
    torch: str
    model: ModelConfig | ChainConfig
    cluster: Cluster
    mesh: Mesh
    batch: Batch
    precision: Precision
    optimizer: Optimizer | None
    checkpoint: Checkpoint | None
    fsdp: Fsdp | None
    allocator: str
    """Text as in PYTORCH_CUDA_ALLOC_CONF, e.g. "expandable_segments:True"."""
    host: Host
    profile: str | None
    """Name of the cost profile, or the absolute path of one's own; None: the GPU's."""
    mode: Mode = "train"
    """train: whole steps; no_grad: evaluation, forward and loss under torch.no_grad() after model.eval(); eval: the same
    without no_grad, so that a graph is built that nobody walks back."""
    offload: Offload | None = None
    compile: Compile | None = None
    pipeline: Pipeline | None = None
    gemm_efficiency: float | None = None
    """Share of the dense peak that large matrix products sustain, as measured by the user; None: the profile's."""
    attention_kernel: str | None = None
    """Name in the cost profile of the kernel that is timed where SDPA runs flash attention; None: flash2."""
    tensor: TensorParallel = field(default_factory=TensorParallel)
    context: ContextParallel = field(default_factory=ContextParallel)
    """Its ranks share sequences, and are among the ranks of `data` and `fsdp`, which reduce gradients."""
    expert: ExpertParallel = field(default_factory=ExpertParallel)
    data: DataParallel | None = None
    """Megatron's training loop; None: PyTorch's (one rank, or FSDP)."""
    ddp: Ddp | None = None
    fsdp1: Fsdp1 | None = None
    zero: Zero | None = None

    @property
    def stages(self) -> int:
        """Ranks that are simulated: one for each pipeline rank, which stands for its symmetric peers."""
        return self.pipeline.degree if self.pipeline is not None else 1

    @property
    def family(self) -> Ddp | Fsdp1 | Zero | None:
        """The sharding family other than FSDP2 and Megatron's, if there is one."""
        return self.ddp or self.fsdp1 or self.zero

    @property
    def data_parallel(self) -> int:
        """Ranks that train on different data; the others share a rank's."""
        return self.cluster.gpus // self.stages // self.tensor.degree // self.context.degree

    @property
    def local_tokens(self) -> int:
        """Tokens of a sequence on one rank, between the operators that tensor-parallel ranks share too."""
        return self.batch.seq_len // self.context.degree


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A scenario file after `resolve`."""

    name: str
    path: Path | None
    description: str
    strategies: tuple[Setup, ...]
    warnings: tuple[str, ...] = field(default_factory=tuple)
    overrides: tuple[str, ...] = ()
    """What --set changed, as given."""
    text: str = ""
    """The whole scenario as one YAML document: what it extends and what was overridden worked in."""

    @property
    def title(self) -> str:
        """The name, with what was changed: "fsdp_ckpt@batch.seq_len=4096"."""
        return f"{self.name}@{','.join(self.overrides)}" if self.overrides else self.name
