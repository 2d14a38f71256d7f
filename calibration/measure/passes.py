"""Memory-bound operators: their family, and how many bytes a program counts for them.

Bytes of an element: `passes` times its item size, and `extra_bytes` whatever its dtype. They are ideal passes over the
tensors, as `sim.runtime` counts them, so that a measured point is looked up by the very work a simulated step asks for.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pass:
    """`counted`: which input's elements count, in the order of the operator's arguments."""

    family: str
    passes: float
    extra_bytes: float = 0.0
    counted: int = 0


PASSES: dict[str, Pass] = {
    "aten::native_layer_norm": Pass("norm_forward", 2),
    "aten::native_layer_norm_backward": Pass("norm_backward", 3),
    "aten::_fused_rms_norm": Pass("norm_forward", 2),
    "aten::_fused_rms_norm_backward": Pass("norm_backward", 3),
    "aten::gelu": Pass("elementwise", 2),
    "aten::gelu_backward": Pass("elementwise", 3),
    "aten::silu": Pass("elementwise", 2),
    "aten::silu_backward": Pass("elementwise", 3),
    "aten::relu": Pass("elementwise", 2),
    "aten::threshold_backward": Pass("elementwise", 3),
    "aten::native_dropout": Pass("dropout", 2, 1),
    "aten::native_dropout_backward": Pass("elementwise", 2, 1),
    "aten::_softmax": Pass("softmax", 2),
    "aten::_softmax_backward_data": Pass("softmax", 3),
    "aten::mul (complex)": Pass("elementwise", 0, 24),
    "aten::conj": Pass("elementwise", 0, 16),
    "aten::embedding": Pass("embedding", 2),
    "aten::embedding_dense_backward": Pass("embedding", 2),
    "aten::_log_softmax": Pass("cross_entropy", 2),
    "aten::_log_softmax_backward_data": Pass("cross_entropy", 3),
    "aten::nll_loss_forward": Pass("reduce", 0, 16, counted=1),
    "aten::nll_loss_backward": Pass("fill", 1, counted=1),
    "aten::add": Pass("elementwise", 3),
    "aten::add_": Pass("elementwise", 3),
    "aten::mul": Pass("elementwise", 3),
    "aten::div": Pass("elementwise", 2),
    "aten::pow": Pass("elementwise", 2),
    "aten::neg": Pass("elementwise", 2),
    "aten::copy_": Pass("copy", 2),
    "aten::clone": Pass("copy", 2),
    "aten::cat": Pass("copy", 2),
    "aten::_to_copy": Pass("elementwise", 1, 4),
    "aten::sum": Pass("reduce", 1),
    "aten::mean": Pass("reduce", 1),
    "aten::zeros": Pass("fill", 1),
    "aten::zeros_like": Pass("fill", 1),
    "aten::_fused_adamw_": Pass("optimizer", 0, 28),
    "aten::_fused_sgd_": Pass("optimizer", 0, 20),
    "aten::_foreach_norm": Pass("reduce", 0, 4),
    "aten::_foreach_mul_": Pass("elementwise", 0, 8),
    "aten::_foreach_copy_": Pass("copy", 0, 8),
}
