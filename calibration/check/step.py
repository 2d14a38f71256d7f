"""A real training step: the script that the simulator plays, on tensors with values."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from calibration.check.networks import SAVED, apply_checkpoint, build, loss_of
from sim.model.config import ModelConfig
from sim.scenario.parallel import Fsdp
from sim.scenario.setup import Checkpoint, Optimizer, Precision, Setup

SEED = 0
RATE = 1e-4
RUNS = (("gpt", "nanogpt"), ("llama", "torchtitan"))
ALIKE = {
    "gpt": {"activation": "gelu_tanh"},
    "llama": {"rope": "complex", "norm": "fused", "gqa": "repeat", "tied_embeddings": False},
}
PLAIN = {
    "attention": "sdpa", "dropout": 0.0, "loss_chunks": 1, "qkv_bias": False, "qk_norm": False, "keep_logits": False,
    "experts": None, "latent": None, "lora": None, "frozen": (),
}  # fmt: skip
"""Choices that the networks here are written with; others are refused."""


def problems_of(setup: Setup) -> Iterator[str]:
    """Why a set-up cannot be run for real here; nothing where it can."""
    c, optimizer = setup.model, setup.optimizer
    if not isinstance(c, ModelConfig) or (c.family, c.implementation) not in RUNS:
        yield "model: gpt as nanogpt and llama as torchtitan are written here"
        return
    for name, value in {**PLAIN, **ALIKE[c.family]}.items():
        if getattr(c, name) != value:
            yield f"model.{name}: {getattr(c, name)}, {value} is written here"
    if setup.batch.accumulation != 1:
        yield "batch.accumulation: one micro-batch per step"
    if optimizer is None or optimizer != Optimizer(variant=optimizer.variant, clip_norm=optimizer.clip_norm):
        yield "optimizer: adamw (fused, foreach or for-loop), zero_grad at the end"
    if setup.precision not in (Precision(compute=setup.precision.parameters), *_mixed(setup)):
        yield "precision: one dtype, or fp32 parameters with bf16 compute"
    if setup.fsdp is not None and setup.fsdp != _written(setup.fsdp):
        yield "parallel.fsdp: degree and reshard_after_forward alone"
    others = (setup.family, setup.pipeline, setup.offload, setup.compile, setup.data)
    if any(others) or setup.mode != "train" or setup.mesh.size != (setup.fsdp.degree if setup.fsdp is not None else 1):
        yield "parallel, offload, compile, mode: training steps of one GPU, or of ranks under FSDP2"
    form = setup.checkpoint
    known = Checkpoint(every=form.every, segment=form.segment, save=form.save) if form is not None else None
    if form != known or not set(form.save if form is not None else ()) <= set(SAVED):
        yield f"checkpoint: every, segment, and save of {', '.join(SAVED)}"


def _mixed(setup: Setup) -> tuple[Precision, ...]:
    return (Precision(autocast=setup.fsdp is None),)


def _written(fsdp: Fsdp) -> Fsdp:
    return Fsdp(degree=fsdp.degree, reshard_after_forward=fsdp.reshard_after_forward)


class TrainingStep:
    """Model, optimizer and data of one strategy; every call is one step. Raises ValueError for what cannot be run."""

    def __init__(self, setup: Setup, device: torch.device | None = None) -> None:
        if found := list(problems_of(setup)):
            raise ValueError("; ".join(found))
        c, batch, optimizer, place = setup.model, setup.batch, setup.optimizer, device or torch.device("cpu")
        assert isinstance(c, ModelConfig) and optimizer is not None
        torch.manual_seed(SEED)
        dtype = torch.bfloat16 if setup.precision.parameters == "bf16" else torch.float32
        self.model = build(c, batch.seq_len).to(place)
        if dtype != torch.float32:
            self.model.to(dtype)
        apply_checkpoint(self.model, setup.checkpoint)
        if setup.fsdp is not None and setup.fsdp.degree > 1:
            shard(self.model, setup.fsdp, setup.precision)
        kind = {"fused": optimizer.variant == "fused", "foreach": optimizer.variant == "foreach"}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, **kind)
        self.clip_norm, self.autocast = optimizer.clip_norm, setup.precision.autocast
        self.upcasts = c.logits == "loss_upcast"
        self.source = torch.randint(0, c.vocab, (batch.micro_batch, batch.seq_len), device=place)
        self.tokens = self.targets = self.source

    def __call__(self) -> None:
        """Forward, loss, backward, clipping, optimizer, zero_grad."""
        self.tokens = self.source.clone()
        self.targets = self.source.clone()
        with torch.autocast(self.source.device.type, torch.bfloat16, enabled=self.autocast):
            loss = loss_of(self.model(self.tokens), self.targets, self.upcasts)
        loss.backward()
        del loss
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def shard(model: nn.Module, fsdp: Fsdp, precision: Precision) -> None:
    """fully_shard every layer, then the root, over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    kind = next(model.parameters()).device.type
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    mixed = precision.compute != precision.parameters
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    layers = list(model.layers)  # type: ignore[arg-type]
    for number, layer in enumerate(layers):
        chosen = fsdp.reshard_after_forward
        reshard = number < len(layers) - 1 if chosen == "torchtitan" else chosen
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
