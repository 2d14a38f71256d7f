"""What the user is told where a measurement cannot be made."""

from __future__ import annotations

NO_TORCH = (
    "calibrate measures with PyTorch, which is not installed: pip install 'sim[calibrate]', "
    "or torch as your GPU needs it"
)
NO_CUDA = (
    "--device cuda: PyTorch sees no CUDA device here ({reason}). On a machine with one, install a build of torch for CUDA; "
    "--device cpu measures the processor instead"
)
DEVICES = ("cuda", "cpu")
FAMILIES = (
    "gemm", "attention", "norms", "activations", "dropout", "softmax", "rope", "embedding", "loss", "residual",
    "optimizers", "copies", "collectives", "host", "contention", "memory_use",
)  # fmt: skip
"""Scripts of `calibration.measure`, in the order in which their designs take turns."""


class CalibrationError(Exception):
    """A calibration that cannot be carried out; the message is for the user."""
