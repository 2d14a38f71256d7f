"""Whose software ran, from the source of a published row, and what that software does where a row does not say.

One entry per software, never per row: which code is imitated, its host costs, the attention kernel of its time, its
optimizer, its dtypes. An entry states facts about the program; nothing in it is fitted to a published step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from sim.checks.facts import Facts
from sim.checks.megatron_age import MegatronAge

Counter = Literal["allocated", "active", "reserved", "device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Facts of a training program. `pattern` is looked for in a row's `source` (then in its notes)."""

    name: str
    pattern: str
    gpt: str = "nanogpt"
    """Implementation that is closest for GPT-like models."""
    llama: str = "torchtitan"
    """Implementation that is closest for Llama-like models."""
    framework: str = "eager"
    """Host-cost profile."""
    launch_blocking: bool = False
    """Its scripts set CUDA_LAUNCH_BLOCKING=1."""
    flash: str | None = None
    """Kernel behind "flash" attention, as cost profiles name it; None: PyTorch's own."""
    optimizer: str = "fused"
    parameters: str = "fp32"
    """Dtype of stored parameters in a run that says 16 bit."""
    reduce: str = "fp32"
    norm: str | None = None
    """RMSNorm of its Llama-like models, if not as in the imitated code."""
    zero_grad: str = "end"
    logits: str | None = None
    """Where logits become fp32, if not as in the imitated code."""
    keep_logits: bool | None = None
    """The training loop holds the logits during backward."""
    early_stop: bool = True
    """Recomputation ends at the last tensor that is needed: torch 2.1 and later."""
    pads_vocabulary: bool = True
    """Where it imitates Megatron: to a multiple of 128 rows per tensor-parallel rank."""
    bf16_optimizer: bool = False
    """In bf16 DeepSpeed's BF16_Optimizer runs, which keeps gradients of both sizes."""
    swiglu_fusion: bool | None = None
    """Megatron's gated MLP is one kernel, if not as in the imitated code."""
    p2p_sync: bool = True
    """Where it imitates Megatron: the host waits for what stages exchange."""
    megatron: MegatronAge = "core"
    """Where it imitates Megatron: of which age (`megatron_age`)."""
    reentrant: bool = False
    """Its recomputation is reentrant: a backward within the backward, which never stops early."""
    compiled_loss: bool = False
    """Where it compiles, it compiles the loss too."""
    sharding: str = ""
    """Label of the data parallelism that it uses where the row prints none."""
    units: str = ""
    """What FSDP2 wraps in its recipes for models whose head is a matrix of its own, if not blocks and root."""
    sequence_parallel: bool = False
    """Its tensor-parallel ranks share the tokens of norms and dropout, where a row does not say."""
    memory: Counter = "allocated"
    """What its "memory" is, where neither the row nor its notes say."""
    since_start: bool = False
    """Its peak is that of the whole run, the first step included."""
    micro_batch_per_stage: bool = False
    """Where no number of micro-batches is given, it makes as many as there are pipeline ranks."""
    loss_chunks: int = 1
    """Chunks in which it projects to logits and computes the loss."""
    recompute: str = ""
    """Its recipes' recomputation, where a row prints none."""
    lora: tuple[int, tuple[str, ...]] = (8, ("q", "v"))
    """Rank and layers of its recipe for adapters: those of LoRA's paper where nothing else is known."""
    often_8_bit: bool = False
    """A row that does not print its precision is as likely an 8-bit run."""
    fp8: str = "delayed"
    """How its recipes scale 8-bit numbers, where a row does not say: Megatron's default."""
    loss_fusion: str = "none"
    """Megatron's fusion of the loss that its recipes ask for."""
    stores_fp8: bool = False
    """Its recipes store weights of 8-bit products in 8 bit."""
    sizes_zero: bool = False
    """Its DeepSpeed configurations leave sizes at "auto": from the hidden size (transformers' documentation)."""
    gemm_efficiency: Mapping[str, float] = field(default_factory=dict)
    """By the catalogue's GPU: share of the dense peak that its authors measured of products on the machine of its runs."""
    allocator: str = ""
    """Settings of PyTorch's allocator that it asks for."""
    torch: str = ""
    """PyTorch that is imitated for it; empty: the newest."""
    extra: str = ""
    """Work of its steps that is not simulated; said with every row."""


MEGATRON = Software(
    name="Megatron",
    pattern="megatron|zero.bubble|libai",
    gpt="megatron",
    llama="megatron",
    reentrant=True,
    flash="cudnn",  # what Transformer Engine takes from Hopper on; profiles of older cards have none: flash2
    sharding="none",
    since_start=True,
)
NEMO = replace(
    MEGATRON,
    name="NeMo",
    pattern="nemo|dgxc",
    reduce="bf16",  # grad_reduce_in_fp32 is off in its bf16 recipes: 2 + 2 + 12/d bytes per parameter in row 33
    sharding="distributed optimizer",  # on by default in its recipes
    sequence_parallel=True,  # bool(tp > 1) in its performance recipes
    often_8_bit=True,
    loss_fusion="native",  # cross_entropy_loss_fusion is on in GPTConfig; native is megatron-core's default
    lora=(16, ("qkv",)),  # llama3_70b_peft_config: dim 16, target_modules linear_qkv
    stores_fp8=True,  # fp8_params in bf16_with_fp8_mixed; fp8_param_gather in Megatron-Bridge's, but for mxfp8
)
MEGATRON_2022 = replace(MEGATRON, name="Megatron of 2022", pattern="korthikanti", megatron="2022", flash=None)
MEGATRON_DEEPSPEED = replace(
    MEGATRON_2022,
    name="Megatron-DeepSpeed",
    pattern="megatron-deepspeed|vtrain",
    framework="megatron-deepspeed",
    memory="device",
)

TRANSFORMERS = Software(
    name="transformers",
    pattern="axolotl|accelerate|transformers|lomo|deepspeed|trl|peft|litgpt|colossalai",
    gpt="transformers",
    llama="transformers",
    framework="transformers",
    sizes_zero=True,
)

KNOWN = (
    Software(
        name="llm-foundry",
        pattern="llm-foundry|mosaicml",
        flash="triton",  # attn_impl: triton in the benchmark scripts of 2023
        optimizer="for-loop",  # composer's DecoupledAdamW
        logits="keep_dtype",  # flash-attn's fused cross entropy, the default loss of MPT
        keep_logits=True,  # composer's state holds a micro-batch's outputs
        early_stop=False,  # torch 1.13, the image of the benchmark scripts
        sharding="fsdp1",
        torch="2.4",  # 1.13 and 2.0: the oldest that is imitated
        extra="two further cross entropies per micro-batch (metrics) are not simulated",
    ),
    Software(
        name="torchtitan",
        pattern=r"torchtitan (PR|issue)#([12]?\d?\d|3[0-8]\d|390)$",  # before pull request 391, June 2024
        norm="manual",
        zero_grad="start",
        logits="model_upcast",
        keep_logits=True,
        optimizer="foreach",
        sharding="fsdp2",
        memory="reserved",
    ),
    Software(
        name="torchtitan",
        pattern=r"torchtitan .*2025",
        zero_grad="start",
        sharding="fsdp2",
        memory="reserved",
        compiled_loss=True,
    ),
    Software(name="torchtitan", pattern=r"torchtitan (PR|issue)#\d{4}", sharding="fsdp2", memory="reserved"),
    Software(
        name="torchtitan",
        pattern="torchtitan|torchao PR",  # of 2024: RMSNorm op by op, AdamW neither fused nor for-loop
        micro_batch_per_stage=True,  # pipeline_parallel_microbatches = degree until pull request 781 of January 2025
        norm="manual",
        zero_grad="start",
        optimizer="foreach",
        sharding="fsdp2",
        memory="reserved",
    ),
    Software(
        name="torchtune",
        pattern="torchtune",
        parameters="bf16",
        reduce="bf16",  # shard_model gives no mixed-precision policy
        units="torchtitan_2026",  # custom_sharded_layers: tok_embeddings, output (llama3_1/70B_full.yaml)
        optimizer="fused",
        sharding="fsdp2",
        memory="active",
        loss_chunks=8,  # CEWithChunkedOutputLoss
        recompute="full",  # enable_activation_checkpointing: True in llama3_1/*.yaml
        lora=(8, ("q", "v", "o", "mlp")),  # llama3_1/8B_lora*.yaml
    ),
    Software(name="fms-fsdp", pattern="fms-fsdp|foundation-model", reduce="bf16", sharding="fsdp1"),
    Software(
        name="stas00",
        pattern="stas00|ml-engineering",
        llama="transformers",
        framework="transformers",
        sharding="zero3",
        sizes_zero=True,
        memory="reserved",
    ),
    Software(
        name="NeMo AutoModel",
        pattern="automodel",
        llama="transformers",
        flash="cudnn",  # Transformer Engine
        parameters="bf16",
        reduce="bf16",
        sharding="fsdp2",
    ),
    replace(  # bigscience-workshop/bigscience, train/tr11-176B-ml/tr11-176B-ml.slurm
        MEGATRON_DEEPSPEED,
        name="BLOOM's Megatron-DeepSpeed",
        pattern="bloom",
        megatron="2021",
        bf16_optimizer=True,  # bf16 with ZeRO stage 0
        launch_blocking=True,  # "do not remove or the training will hang"
    ),
    replace(
        MEGATRON_DEEPSPEED,
        name="BigScience's Megatron-DeepSpeed",
        pattern="bigscience",
        megatron="2021",
        p2p_sync=False,  # DeepSpeed's pipeline engine: p2p.send and p2p.recv, in the order of streams
    ),
    replace(  # VIA-Research/vTrain, src/config.py, src/model and src/predictor.py
        MEGATRON_DEEPSPEED,
        name="vTrain's model of Megatron-DeepSpeed",
        pattern="vtrain",
        megatron="2021",
        reduce="fp16",
        pads_vocabulary=False,
    ),
    MEGATRON_DEEPSPEED,
    replace(
        NEMO,
        name="Megatron-Bridge",
        pattern="megatron-bridge",
        loss_fusion="te",  # cross_entropy_fusion_impl in its recipes
        fp8="tensorwise",  # "FP8" of its performance summary is per-tensor current scaling
    ),
    NEMO,
    replace(
        MEGATRON,
        name="Megatron-Kwai",
        pattern="kwai",  # of Megatron's models before core, whose flash attention is flash-attn's; no fusions are asked for
        flash=None,
        swiglu_fusion=False,
    ),
    replace(
        MEGATRON,
        name="InternEvo",
        pattern="internevo|internlm",  # flash-attn's and apex's kernels, ZeRO-1 with fp32 main parameters, Megatron's split
        reduce="bf16",  # HybridZeroOptimizer reduces in the parameters' dtype
        flash=None,
        swiglu_fusion=False,  # FeedForward: silu(w1(x)) * w3(x)
        loss_fusion="te",  # flash-attn's cross entropy, whose gradient takes the place of the logits too
        sharding="distributed optimizer",
        pads_vocabulary=False,
    ),
    replace(
        MEGATRON_2022,
        name="Megatron of 2021",
        pattern="narayanan|ptd-p|dlperf",
        megatron="2021",
        reduce="fp16",  # accumulate-allreduce-grads-in-fp32 is off by default
    ),
    replace(MEGATRON_2022, pattern="korthikanti|megascale"),
    replace(
        MEGATRON,
        name="SimuMax's Megatron",
        pattern="simumax",
        gemm_efficiency={
            "b200-sxm-180gb": 0.51
        },  # fitted to its table of products, not to its steps: see the profile's source
    ),
    MEGATRON,
    Software(
        name="LLMQ",
        pattern="llmq",
        gpt="megatron",
        llama="megatron",
        reduce="bf16",
        flash="cudnn",
        sharding="zero1",
        fp8="tensorwise",  # scales of the present tensor
        extra="Megatron's fused layers and its loop stand for a C++ program with chunked logits",
    ),
    replace(
        TRANSFORMERS,
        name="ArcticTraining",
        pattern="alst|arctic long",
        allocator="expandable_segments:True",  # arXiv 2506.13996 asks for it
    ),
    TRANSFORMERS,
)
UNKNOWN = Software(name="unknown software", pattern="")


def software_of(facts: Facts) -> Software:
    """The entry whose pattern the row's source matches; `UNKNOWN` where none does."""
    source = facts.text.get("source", "")
    for software in KNOWN:
        if re.search(software.pattern, source, re.IGNORECASE):
            return software
    return UNKNOWN
