"""A real training step: the script that the simulator plays, on tensors with values."""

from __future__ import annotations

import torch

from calibration.check.networks import apply_checkpoint, build, loss_of
from sim.model.config import ModelConfig
from sim.scenario.setup import Setup

SEED = 0
RATE = 1e-4


class TrainingStep:
    """Model, optimizer and data of one strategy; every call is one step. Raises ValueError for what it cannot run."""

    def __init__(self, setup: Setup, device: torch.device | None = None) -> None:
        c, batch, optimizer = setup.model, setup.batch, setup.optimizer
        if not isinstance(c, ModelConfig) or (c.family, c.implementation) not in RUNS:
            raise ValueError("networks that can be run: gpt as nanogpt, llama as torchtitan")
        if c.dropout or batch.accumulation != 1 or optimizer is None or optimizer.name != "adamw":
            raise ValueError("a step that can be run has no dropout, one micro-batch and AdamW")
        torch.manual_seed(SEED)
        self.model = build(c, batch.seq_len).to(device or "cpu")
        apply_checkpoint(self.model, setup.checkpoint)
        kind = {"fused": optimizer.variant == "fused", "foreach": optimizer.variant == "foreach"}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, **kind)
        self.clip_norm = optimizer.clip_norm
        self.source = torch.randint(0, c.vocab, (batch.micro_batch, batch.seq_len), device=device)
        self.autocast = setup.precision.autocast
        self.tokens = self.targets = self.source

    def __call__(self) -> None:
        """Forward, loss, backward, optimizer, zero_grad."""
        self.tokens = self.source.clone()
        self.targets = self.source.clone()
        with torch.autocast(self.source.device.type, torch.bfloat16, enabled=self.autocast):
            loss = loss_of(self.model(self.tokens), self.targets)
        loss.backward()
        del loss
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


RUNS = (("gpt", "nanogpt"), ("llama", "torchtitan"))
