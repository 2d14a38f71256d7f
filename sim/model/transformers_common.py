"""What transformers' causal language models share: positions, the causal mask's check, the loss (transformers 5.24)."""

from __future__ import annotations

from typing import Any

from sim.model import functional as F
from sim.model import liger
from sim.model.calls import Tensor, active
from sim.model.language_model import LanguageModel, Linear
from sim.model.module import Parameter


def make_position_ids(length: int) -> Tensor:
    """torch.arange(S) + number of past tokens, as [1, S]."""
    past = F.empty((length,), "int64")
    return F.compute("add", (length,), "int64", past).view(1, length)


def make_sliding_mask(batch: int, length: int) -> Tensor:
    """create_sliding_window_causal_mask of positions without padding: bool [S, S], of positions and two conditions."""
    each_batch, each_head = F.empty((batch,), "int64"), F.empty((1,), "int64")
    queries = F.compute("add", (length,), "int64", F.compute("arange", (length,), "int64"))
    keys = F.compute("add", (length,), "int64", F.compute("arange", (length,), "int64"))
    ones = F.empty((), "bool")
    shape = (length, length)
    begins = F.compute("sub", (length,), "int64", queries)
    inside = F.compute("gt", shape, "bool", keys, begins)
    del begins
    mask = F.compute("bitwise_and", shape, "bool", inside)
    del inside, ones
    causal = F.compute("le", shape, "bool", keys, queries)
    both = F.compute("bitwise_and", shape, "bool", mask, causal)
    del causal, mask, each_batch, each_head, queries, keys
    return both


def check_packed_sequences(batch: int, position_ids: Tensor) -> None:
    """create_causal_mask without an attention mask: do the positions restart, i.e. are sequences packed?

    The answer is read on the host. It is no, so that no mask is made: SDPA gets is_causal.
    """
    shape = (batch, position_ids.shape[1])
    before_first = F.compute("sub", (batch, 1), "int64", position_ids)
    extended = F.compute("cat", (batch, shape[1] + 1), "int64", before_first, position_ids)
    difference = F.compute("sub", shape, "int64", extended)
    del extended
    sequence = F.cumsum(F.compute("ne", shape, "bool", difference))
    at_end = F.compute("eq", (batch,), "bool")
    whole = F.compute("all", (), "bool", at_end)
    F.read_on_host()
    del before_first, difference, sequence, at_end, whole


class TransformersModel(LanguageModel):
    """A model that computes its own loss: what forward's frame holds is alive meanwhile."""

    checkpoints_first = True
    passes_keywords = True
    lm_head: Linear

    def compute_loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        outputs: Any = self(tokens, targets)
        return outputs if isinstance(outputs, tuple) else (outputs, None)

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The loss and the logits; where Liger fuses them, the loss alone."""
        hidden = self.hidden_states(tokens)
        if "fused_linear_cross_entropy" in self.config.liger:
            with active().computing_loss():
                return self._fused_loss(hidden, labels)
        logits = self.lm_head(hidden)
        if self.config.logits == "model_upcast":
            logits = logits.float()
        with active().computing_loss(logits):
            return self.loss(logits, labels), logits

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """ForCausalLMLoss: logits in fp32; labels padded by one and shifted (a copy where B > 1)."""
        if self.config.logits == "loss_upcast":
            logits = logits.float()
        padded = padded_labels(targets)
        shifted = shifted_labels(padded)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), shifted.view(-1))

    def external_parameters(self) -> tuple[Parameter, ...]:
        fuses = "fused_linear_cross_entropy" in self.config.liger
        return (self.lm_head.weight,) if fuses else ()

    def _fused_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """LigerForCausalLMLoss: logits never exist as a whole."""
        padded = padded_labels(targets)
        shifted = shifted_labels(padded)
        flat = hidden.view(-1, hidden.shape[-1])
        return liger.fused_linear_cross_entropy(flat, self.lm_head.weight, shifted.view(-1))


def padded_labels(targets: Tensor) -> Tensor:
    """One more per sequence."""
    batch, length = targets.shape
    return F.compute("constant_pad_nd", (batch, length + 1), "int64", targets)


def shifted_labels(padded: Tensor) -> Tensor:
    """Of the next token; a copy where there are several sequences."""
    return padded.narrow(1, 1, padded.shape[1] - 1).contiguous()
