"""The loss in chunks of the sequence, so that logits [B, S, V] in fp32 never exist at once. B batch, S sequence, V vocab.

backward: torchtitan's ChunkedCELoss: projection, loss and backward chunk by chunk, over detached hidden states whose
gradient is assembled in fp32 and handed to the network's backward. projection: torchtune's: each chunk is projected and
upcast by itself, one backward. logits: the same after projecting all at once, which keeps more alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sim.model import functional as F
from sim.model import gradients
from sim.model.calls import Tensor

Head = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


def backward_per_chunk(hidden: Tensor, targets: Tensor, chunks: int, head: Head, loss: Loss) -> Tensor:
    """The loss of hidden states [B, S, H]; its backward hands over the gradient that is known already."""
    pieces = [gradients.leaf(piece) for piece in [piece.contiguous() for piece in hidden.chunk(chunks)]]
    labels = [label.contiguous() for label in targets.chunk(chunks)]
    gradient = F.empty(hidden.shape, "fp32")
    total = F.empty((), "fp32")
    for piece, label in zip(pieces, labels):
        logits = head(piece)
        part = loss(logits, label)
        total = gradients.add_detached(total, part)
        if gradients.needs_gradient(hidden):
            gradients.backward(part)
            gradients.move_gradient(piece, gradient)
    if not gradients.needs_gradient(hidden):
        return total
    known = gradient.to(hidden.dtype)
    return gradients.with_known_gradient(hidden, known, total)


def loss_per_chunk(logits: Sequence[Tensor], labels: Sequence[Tensor], loss: Loss) -> Tensor:
    """Sum of the chunks' losses, one graph."""
    total: Tensor | None = None
    for chunk, label in zip(logits, labels):
        part = loss(chunk, label)
        total = part if total is None else total + part
    assert total is not None
    return total
