"""The vocabulary of a scenario file: its sections and their fields, with meaning, default and what they interact with.

Only the border is here: `resolve` turns valid sections into `Setup` objects and checks that they fit each other.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from sim.scenario.checkpoint_section import CheckpointSection
from sim.scenario.cluster_section import ClusterSection
from sim.scenario.compile_section import CompileSection
from sim.scenario.context import ContextSection
from sim.scenario.experts import ExpertParallelSection, ExpertsSection, LatentSection
from sim.scenario.families import DdpSection, Fsdp1Section, ZeroSection
from sim.scenario.kinds import (
    BytesPerLayer,
    Count,
    CountOrZero,
    Duration,
    DurationPerLayer,
    Layers,
    LigerKernels,
    MicroBatches,
    Momentum,
    Names,
    Placement,
    PositiveNumber,
    Probability,
    Ranks,
    Reshard,
    ReshardRoot,
    Sequences,
    Share,
    Tokens,
    Version,
)
from sim.scenario.lora import LoraSection
from sim.scenario.megatron_section import DataSection, TensorSection
from sim.scenario.model_fields import EncoderFields, TiledFields
from sim.scenario.offload import OffloadSection
from sim.scenario.precision_section import PrecisionSection
from sim.scenario.section import Section


class ChainSection(Section):
    """The toy of the textbook: layers with given bytes and times. A list has one entry per layer; "98 MiB x 83" stands for
    83 of them."""

    layers: Layers
    """Number of layers."""
    entry: BytesPerLayer
    """Bytes of a layer's input, which a checkpoint keeps."""
    activation: BytesPerLayer
    """Bytes that a layer saves for its backward."""
    forward: DurationPerLayer
    """Time of a layer's forward."""
    backward: DurationPerLayer
    """Time of a layer's backward, without recomputation."""
    weight_gradient: DurationPerLayer | None = None
    """The part of `backward` that makes weight gradients, which zero-bubble schedules put off. Default: half of it."""
    recompute: DurationPerLayer | None = None
    """Time to run a layer's forward again. Default: `forward`."""
    exposed_communication: Duration = 0
    """Communication per step that nothing hides, when nothing is recomputed. Default: 0 s."""
    recompute_communication: Duration = 0
    """Further communication per step that cannot hide once layers are recomputed. Default: 0 s."""
    shares_entry: bool = False
    """The entry is part of what the layer saves, as in PyTorch; false (default): it comes on top."""


class ModelSection(EncoderFields, TiledFields):
    """What is trained: exactly one of `preset`, `config` and `chain`; every other field overrides what that gives."""

    preset: str | None = None
    """A published model by name, e.g. llama-3.1-8b."""
    config: str | None = None
    """Path of a Hugging Face config.json (Llama, Mistral, Mixtral, Qwen2, Qwen3, their MoE, DeepSeek-V2 and -V3, GPT-2,
    BERT, T5, ViT), relative to this file."""
    chain: ChainSection | None = None
    """A chain of layers with given bytes and times; takes no other field of this section."""
    implementation: Literal["torchtitan", "transformers", "nanogpt", "megatron"] | None = None
    """Whose code is imitated; it decides which tensors are saved and sets the defaults of the choices below.

    Default: torchtitan for Llama-like models, nanogpt for GPT."""
    layers: Layers | None = None
    """Number of transformer blocks."""
    hidden: Count | None = None
    """Width of the residual stream."""
    ffn_hidden: Count | None = None
    """Width inside the MLP."""
    heads: Count | None = None
    """Query heads; must divide `hidden` unless `head_dim` is given."""
    kv_heads: Count | None = None
    """Key and value heads; must divide `heads`."""
    head_dim: Count | None = None
    """Width of a head. Default: hidden / heads."""
    vocab: Count | None = None
    """Rows of the embedding, padded as the training code pads them."""
    max_positions: Count | None = None
    """Longest sequence of the model: with learned positions a limit, with rotary positions a recommendation."""
    tied_embeddings: bool | None = None
    """Embedding and head are one parameter."""
    bias: bool | None = None
    """Biases in all linear layers: they run aten.addmm instead of aten.mm, which matters to `checkpoint.save`."""
    qkv_bias: bool | None = None
    """Biases in the query, key and value projections only (Qwen2)."""
    qk_norm: bool | None = None
    """RMSNorm over each head of q and k (Qwen3)."""
    dropout: Probability | None = None
    """Probability of dropout after attention, projections and embedding; 0 leaves dropout out."""
    activation: Literal["silu", "gelu", "gelu_tanh", "gelu_new", "relu", "gated_gelu", "squared_relu"] | None = None
    """Activation of the MLP; gelu_new is written out in Python and saves more than the fused ones; squared_relu (Nemotron,
    for megatron's Llama-like models) has no gate."""
    norm: Literal["fused", "manual", "layer_norm"] | None = None
    """fused: one RMSNorm kernel; manual: RMSNorm op by op in fp32; layer_norm: GPT, and megatron's Llama-like models."""
    rope: Literal["complex", "cos_sin", "half", "fused", "none", "relative"] | None = None
    """Rotary positions: complex or cos_sin in fp32, half in the model's dtype, fused: one kernel; none: learned ones."""
    gqa: Literal["repeat", "sdpa"] | None = None
    """Grouped-query attention: repeat copies k and v to all heads, sdpa lets the kernel read fewer heads."""
    mtp_layers: CountOrZero | None = None
    """megatron, Llama-like models: layers behind the last that each predict one token more through the same head (multi-token
    prediction; DeepSeek-V3: 1), up to 3. Never recomputed here. Default: 0."""
    window: Count | None = None
    """megatron, Llama-like models: keys that a query sees at most, itself among them (sliding window). Default: all."""
    full_attention_every: Count | None = None
    """With `window`: every so-manieth layer sees all keys (GPT-OSS: 2). Default: none does."""
    attention: Literal["sdpa", "math", "unfused"] | None = None
    """sdpa: the fused kernel that PyTorch picks; math: SDPA's math kernel; unfused: written out op by op, as
    Megatron's own and transformers' "eager"."""
    bias_gelu_fusion: bool | None = None
    """megatron: gelu(x + bias) in one kernel. Default: true there."""
    swiglu_fusion: bool | None = None
    """megatron, Llama-like models: silu(gate) * value in one kernel. Default: true there."""
    fp8_swiglu_input: bool | None = None
    """megatron, Llama-like models: what SwiGLU reads (the largest activation, also of experts) is kept in 8 bit until
    backward, which casts it back (activation_func_fp8_input_store); products stay as they are. Default: false."""
    bias_dropout_fusion: bool | None = None
    """megatron: residual + dropout(x + bias) in one kernel. Default: true there."""
    persistent_norm: bool | None = None
    """megatron: norms by kernels that keep a row in registers, as Transformer Engine and apex's FastLayerNorm do (from
    2022 on; apex knows hidden sizes such as 1024, 4096, 6144, 12288), at more of the bandwidth. Default: true there."""
    loss_fusion: Literal["none", "native", "te"] | None = None
    """megatron (cross-entropy-loss-fusion, cross-entropy-fusion-impl): the loss per token op by op, in regions that
    torch.compile makes, or in Transformer Engine's kernels, which keep no fp32 copy of the logits. Default: none."""
    logits: Literal["loss_upcast", "model_upcast", "keep_dtype"] | None = None
    """Where logits become fp32: in the loss function, in the model, or nowhere."""
    keep_logits: bool | None = None
    """The training loop still holds the logits during backward."""
    loss_chunks: Count | None = None
    """Chunks of the sequence in which the loss is computed, for torchtitan and nanogpt. Default: 1, all at once."""
    loss_chunking: Literal["backward", "projection", "logits"] | None = None
    """What goes chunk by chunk: backward (default): projection, loss and backward, as torchtitan's ChunkedCELoss;
    projection: projection and loss, as torchtune; logits: the loss alone, over logits that exist as a whole."""
    liger: LigerKernels | None = None
    """transformers, Llama-like models: kernels of Liger-Kernel in the place of its own, as named in its
    apply_liger_kernel_to_llama. fused_linear_cross_entropy: head and loss chunk by chunk (about as many logits at a time
    as hidden states), gradients computed on the way, no logits kept. Default: none."""
    experts: ExpertsSection | None = None
    """Experts in the place of MLPs. Default: those of the preset or config.json."""
    latent: LatentSection | None = None
    """Multi-head latent attention. Default: that of the preset or config.json."""
    frozen: Names | None = None
    """Parameters that are not trained, by name or pattern, e.g. ["tok_embeddings.*", "layers.0.*"]. Default: none."""
    input_gradients: bool | None = None
    """The embedding's output is made to require a gradient although the embedding is frozen, as reentrant regions need
    (enable_input_require_grads). Default: true with transformers and checkpointing, else false."""
    lora: LoraSection | None = None
    """Adapters; everything else is frozen. Default: null, all parameters are trained."""


class BatchSection(Section):
    """How much one step trains on: micro_batch x accumulation sequences on every data-parallel rank."""

    micro_batch: Sequences
    """Sequences (images, for ViT) per rank and forward pass."""
    seq_len: Tokens = 0
    """Tokens per sequence; of an encoder-decoder: of the source. Images have none: leave it out."""
    target_len: Tokens = 0
    """Tokens per target sequence, which the decoder of an encoder-decoder (T5) reads and predicts. Only there."""
    accumulation: MicroBatches = 1
    """Micro-batches per optimizer step. Default: 1."""


class FsdpSection(Section):
    """FSDP2: fully_shard on every block and on the root."""

    degree: Ranks
    """Ranks that share one copy of the parameters; degree x replicas is the number of GPUs."""
    replicas: Ranks = 1
    """Copies of the sharded model (HSDP). Default: 1."""
    reshard_after_forward: Reshard = "torchtitan"
    """Blocks drop their gathered parameters after forward: true, false, a number of ranks to reshard to (a divisor of
    `degree`), or torchtitan (default): all but the last block."""
    root_reshard_after_forward: ReshardRoot | None = None
    """The same for the root unit, from PyTorch 2.8 on, with units: blocks. Default: null, PyTorch's default: the root
    stays gathered."""
    units: Literal["blocks", "torchtitan_2026"] = "blocks"
    """What is wrapped: blocks and root (default), or torchtitan of 2026: embedding, blocks, norm with head, root
    (implementation torchtitan with untied embeddings only)."""
    wrap: Literal["fsdp(checkpoint)", "checkpoint(fsdp)"] = "fsdp(checkpoint)"
    """Which wrapper is outside. Default: fsdp(checkpoint), as torchtitan; FSDP2 gathers equally often either way."""
    forward_prefetch: CountOrZero = 0
    """Units gathered ahead explicitly in forward. Default: 0, FSDP2's implicit overlap."""
    backward_prefetch: CountOrZero | None = None
    """Units gathered ahead in backward. Default: null, FSDP2's implicit prefetch of one unit."""
    reduce_scatter_buffers: Count = 1
    """Reduce-scatter inputs alive at a time. Default: 1, as FSDP2."""
    gradient_sync: Literal["every", "last"] = "every"
    """With `batch.accumulation` above 1: reduce gradients of every micro-batch (default), or only of the last one and
    keep unsharded gradients meanwhile."""
    cast_forward_inputs: bool = True
    """Cast the inputs of wrapped modules to the compute dtype. Default: true."""
    float8_all_gather: bool = False
    """Blocks' matrices are cast to 8 bit before the all-gather (torchao's enable_fsdp_float8_all_gather), with scales
    computed for all of them after the optimizer. Needs precision.float8: tensorwise, or precision.fp8. Default: false."""
    cpu_offload: bool = False
    """CPUOffloadPolicy: parameters, gradients and optimizer states live in pinned host memory, and the CPU runs the
    optimizer. Default: false."""


class PipelineSection(Section):
    """Pipeline stages; `batch.accumulation` is the number of micro-batches. Embedding and head are on the first and the
    last stage. With `fsdp`, gradients are reduced after a stage's last micro-batch."""

    degree: Ranks
    """Ranks that a micro-batch passes; degree x fsdp degree x replicas is the number of GPUs."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"] = "1f1b"
    """Order of forwards and backwards, as torch.distributed.pipelining's (zb-h2 as in its paper). Default: 1f1b."""
    virtual: Count | None = None
    """Stages (model chunks) per rank. Default: 2 for interleaved, breadth-first, zb-v and dualpipe-v, else 1."""
    placement: Placement = "balanced"
    """Layers per stage, first stage first, e.g. [7, 9, 9, 7]. Default: balanced; what is left over goes to the stages
    after the first."""
    overlap_p2p: bool | None = None
    """megatron, interleaved: compute goes on beside what is sent (overlap-p2p-communication; since 2023). Default: true.
    Megatron's 1F1B always waits, the other schedules never do."""
    p2p_sync: bool | None = None
    """megatron, where compute waits for transfers: the host waits for them too (batch_p2p_sync). false: streams alone, as
    DeepSpeed's pipeline. Default: true."""
    scatter_gather: bool = False
    """megatron, tensor parallel without sequence parallelism: each rank sends its share of the hidden states, which all
    have, and gathers what arrives (Megatron until 2022, DeepSpeed's pipeline). Default: false."""


class ParallelSection(Section):
    """How the ranks share the work. Empty or absent: one GPU."""

    fsdp: FsdpSection | None = None
    """Fully sharded data parallelism (FSDP2). Default: null."""
    ddp: DdpSection | None = None
    """DistributedDataParallel. Default: null."""
    fsdp1: Fsdp1Section | None = None
    """FullyShardedDataParallel (FSDP1). Default: null."""
    zero: ZeroSection | None = None
    """DeepSpeed's ZeRO. Default: null."""
    tensor: TensorSection | None = None
    """Tensor parallelism, for implementation megatron; with Megatron's training loop unless `fsdp` is given.
    Default: null."""
    data: DataSection | None = None
    """Data parallelism with Megatron's training loop, for implementation megatron. Default: null."""
    context: ContextSection | None = None
    """Context parallelism, for implementations megatron and torchtitan. Default: null."""
    expert: ExpertParallelSection | None = None
    """Expert parallelism, for implementation megatron. Default: null."""
    pipeline: PipelineSection | None = None
    """Pipeline parallelism. Default: null."""


class OptimizerSection(Section):
    """Which optimizer steps, and when. `optimizer: null` plays steps without an optimizer."""

    name: Literal["adamw", "adamw-8bit", "sgd"] = "adamw"
    """adamw (default) and sgd as torch.optim runs them; adamw-8bit: bitsandbytes' AdamW8bit, moments of one byte."""
    variant: Literal["fused", "foreach", "for-loop"] = "fused"
    """fused (default): one kernel per chunk, no temporaries; foreach: fast, AdamW's with temporaries as large as the
    parameters; for-loop: one parameter at a time. adamw-8bit has one form only."""
    momentum: Momentum = 0.0
    """SGD's momentum; above 0 there is a buffer as large as the parameters. Default: 0."""
    master_weights: bool = False
    """Step fp32 copies of 16-bit parameters (under `fsdp`: of each rank's shards), as Megatron does; gradients are cast to
    fp32 before clipping. Default: false."""
    fp32_gradients: bool = False
    """With master_weights: gradients of every micro-batch are added to fp32 ones that stay, and the 16-bit ones stay too, as
    in DeepSpeed's BF16_Optimizer: 20 bytes per parameter. Default: false."""
    in_backward: bool = False
    """Step each parameter inside backward, as soon as its gradient is there, and free the gradient: there is never more
    than a few parameters' gradients. Needs `clip_norm: null` and one micro-batch per step. Default: false."""
    offload: Literal["states", "gradients"] | None = None
    """AdamW steps copies of the parameters on the CPU, gradients leave during backward, parameters come back after their
    step (torchao's CPUOffloadOptimizer). states: moments are in host memory; gradients: each gradient is also freed as
    soon as it has left. Needs `clip_norm: null`. Default: null, everything is on the GPU."""
    clip_norm: PositiveNumber | None = 1.0
    """Largest gradient norm; null: no clipping. Default: 1.0."""
    zero_grad: Literal["start", "end"] = "end"
    """Gradients are freed at the end of a step (default) or at the start of the next."""


Mode = Literal["train", "eval", "no_grad"]


class HostSection(Section):
    """The training script's thread."""

    framework: str = "eager"
    """Name of the host-cost profile. Default: eager."""
    sync: list[Literal["loss", "clip"]] = Field(default=["loss"])
    """Where the loop waits for the GPU: loss (loss.item()), clip (reading the norm). Default: [loss]."""
    launch_blocking: bool = False
    """The host waits for every kernel, copy and collective that it launches (CUDA_LAUNCH_BLOCKING=1), so that nothing overlaps
    and the host's time adds to theirs. Default: false."""


class StrategySection(Section):
    """What one strategy changes; sections merge key by key with the scenario's, `checkpoint: null` switches it off."""

    model: Any = None
    batch: Any = None
    parallel: Any = None
    precision: Any = None
    optimizer: Any = None
    checkpoint: Any = None
    mode: Any = None
    offload: Any = None
    compile: Any = None
    allocator: Any = None
    host: Any = None


class ScenarioFile(Section):
    """One training step, described; strategies to compare beside it."""

    extends: str | None = None
    """Another scenario file, relative to this one, that this one changes; sections merge key by key."""
    description: str = ""
    """A line for people."""
    torch: Version = "2.14"
    """Version of PyTorch that is imitated, 2.4 to 2.14. Default: "2.14". Write it in quotes."""
    model: ModelSection
    cluster: ClusterSection | None = None
    """May be absent for a chain only: one GPU then."""
    batch: BatchSection | None = None
    """May be absent for a chain only."""
    parallel: ParallelSection | None = Field(default_factory=ParallelSection)
    precision: PrecisionSection = Field(default_factory=PrecisionSection)
    optimizer: OptimizerSection | None = Field(default_factory=OptimizerSection)
    checkpoint: CheckpointSection | None = None
    """Checkpointing of every strategy that does not say otherwise. Default: null, none."""
    mode: Mode = "train"
    """train (default): whole steps. no_grad: evaluation, forward and loss only, after model.eval() and under
    torch.no_grad(). eval: the same without no_grad, a classic mistake: a graph is built that nobody walks back."""
    compile: CompileSection | None = None
    """torch.compile of every strategy that does not say otherwise. Default: null, eager mode."""
    offload: OffloadSection | None = None
    """Offload of every strategy that does not say otherwise. Default: null, none."""
    allocator: str = ""
    """Text as in PYTORCH_CUDA_ALLOC_CONF, e.g. "expandable_segments:True". Default: PyTorch's defaults. off: tensors' bytes
    are counted without an allocator, for very large runs; reserved bytes are then taken as allocated ones (assumed),
    and the second step is mostly the steady one."""
    host: HostSection = Field(default_factory=HostSection)
    profile: str | None = None
    """Name of the cost profile, or a file of your own (mine.yaml, beside this one; python -m sim calibrate writes it).
    Default: the one of the GPU."""
    gemm_efficiency: Share | None = None
    """Share of the dense peak that large matrix products sustain on your own card, power limit and software: the one
    number most worth measuring. Default: the profile's."""
    attention_kernel: str | None = None
    """Which fused attention kernel is timed, by its name in the cost profile: triton (FlashAttention 1), flash2, flash3,
    cudnn, efficient. Default: the one that PyTorch's SDPA runs (flash2 in 16 bit). Bytes stay SDPA's."""
    strategies: dict[str, StrategySection | None] | None = None
    """What to compare, by name. Default: one strategy called default."""


STRATEGY_FIELDS = tuple(StrategySection.model_fields)
