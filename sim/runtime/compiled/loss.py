"""How cross entropy traces: two statistics per row, then one pass in backward; log probabilities never are in memory."""

from __future__ import annotations

from sim.runtime import strides as st
from sim.runtime.compiled.graph import Value
from sim.runtime.compiled.trace import Gradients, Tracer, rule


@rule("cross_entropy")
def cross_entropy(t: Tracer, logits: Value, targets: Value) -> Value:
    """Mean over all rows of logits [N, V], in fp32; what backward reads are the logits, each row's maximum and sum."""
    rows = (logits.shape[0], 1)
    wide = t.convert(logits, "fp32")
    largest = t.reduction("aten.amax", wide, rows)
    total = t.reduction("aten.sum", t.pointwise("aten.exp", t.pointwise("aten.sub", wide, largest)), rows)
    at_target = t.view(logits.storage, rows, st.normalize(rows, (logits.shape[1], 1)), logits.dtype)
    losses = t.pointwise("aten.nll_loss_forward", t.convert(at_target, "fp32"), largest, total, targets, shape=rows)
    loss = t.pointwise("aten.div", t.reduction("aten.sum", losses, ()))

    def backward(g: Value) -> Gradients:
        name = "aten._log_softmax_backward_data"
        return [t.pointwise(name, wide, largest, total, targets, g), None]

    t.record(loss, (logits, targets), backward)
    return loss
