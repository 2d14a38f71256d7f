"""What transformers' causal language models share: positions, the causal mask's check, the loss (transformers 5.24)."""

from __future__ import annotations

from sim.model import functional as F
from sim.model.calls import Tensor
from sim.model.language_model import LanguageModel


def make_position_ids(length: int) -> Tensor:
    """torch.arange(S) + number of past tokens, as [1, S]."""
    past = F.empty((length,), "int64")
    return F.compute("add", (length,), "int64", past).view(1, length)


def check_packed_sequences(batch: int, position_ids: Tensor) -> None:
    """create_causal_mask without an attention mask: do the positions restart, i.e. are sequences packed?

    The answer is read on the host. It is no, so that no mask is made: SDPA gets is_causal.
    """
    shape = (batch, position_ids.shape[1])
    before_first = F.compute("sub", (batch, 1), "int64", position_ids)
    extended = F.compute("cat", (batch, shape[1] + 1), "int64", before_first, position_ids)
    difference = F.compute("sub", shape, "int64", extended)
    del extended
    sequence = count_breaks(F.compute("ne", shape, "bool", difference))
    at_end = F.compute("eq", (batch,), "bool")
    whole = F.compute("all", (), "bool", at_end)
    F.read_on_host()
    del before_first, difference, sequence, at_end, whole


def count_breaks(breaks: Tensor) -> Tensor:
    """bool.cumsum(-1): the result, then an int64 copy of the input that dies inside."""
    result = F.compute("cumsum", breaks.shape, "int64", breaks)
    F.compute("copy_", breaks.shape, "int64", breaks)
    return result


class TransformersModel(LanguageModel):
    """A model whose loss is transformers' ForCausalLMLoss."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Logits in fp32; labels padded by one and shifted by a copy, so that every position has one."""
        batch, length, vocab = logits.shape
        if self.config.logits == "loss_upcast":
            logits = logits.float()
        labels = F.compute("constant_pad_nd", (batch, length + 1), "int64", targets)
        shifted = F.compute("clone", (batch, length), "int64", labels)
        return F.cross_entropy(logits.view(-1, vocab), shifted.view(-1))
