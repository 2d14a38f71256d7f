"""Measurements of the device at hand: kernels, copies, collectives, host costs, memory outside PyTorch's allocator.

    python -m sim calibrate --device cuda --scenario mine.yaml --minutes 5 --out mine-h100.yaml
    python -m calibration.measure.gemm --device cpu --minutes 1

One file per family, each runnable alone. What is measured goes to `<name>.points.jsonl`, a line per point, beside the
profile that `calibration.own` fits to it. Only files that touch tensors import torch.
"""
