"""What Megatron did in which year, where its code of today does otherwise: settings of a row's scenario.

core: megatron-core with Transformer Engine. 2022: apex's persistent norms for the sizes that it knows, a share of the
hidden states sent between stages, transfers that compute waits for. 2021, and DeepSpeed's fork of it: the older norms,
gradients of inputs summed in the open, products for weights' gradients apart from their sums.
Sources: NVIDIA/Megatron-LM and bigscience-workshop/Megatron-DeepSpeed, p2p_communication.py, fused_layer_norm.py,
mpu/layers.py; DeepSpeed's PipelineEngine sends shares too (is_pipe_partitioned).
"""

from __future__ import annotations

from typing import Any, Literal

MegatronAge = Literal["core", "2022", "2021"]

PERSISTENT_SIZES = frozenset({
    1024, 1536, 2048, 2304, 3072, 3840, 4096, 5120, 6144, 8192, 10240, 12288, 12800, 15360, 16384, 18432, 20480, 24576,
    25600, 30720, 32768, 40960, 49152, 65536,
})  # fmt: skip
"""Hidden sizes of apex's FastLayerNorm."""


def as_of(age: MegatronAge, document: dict[str, Any]) -> dict[str, Any]:
    """The scenario of a row, with what Megatron's code of that age does. Other implementations are left as they are."""
    model, parallel = document["model"], dict(document["parallel"])
    if age == "core" or model["implementation"] != "megatron":
        return document
    if age == "2021" or model.get("hidden") not in PERSISTENT_SIZES:
        model = model | {"persistent_norm": False}
    tensor, data, pipeline = (parallel.get(name) for name in ("tensor", "data", "pipeline"))
    splits_tokens = tensor is not None and tensor["sequence_parallel"]
    if age == "2021" and tensor is not None and not splits_tokens:
        parallel["tensor"] = tensor | {"async_all_reduce": False}
    if age == "2021" and data is not None:
        parallel["data"] = data | {"gradient_accumulation_fusion": False}
    if pipeline is not None:
        waits = {"overlap_p2p": False} if pipeline["schedule"] == "interleaved" else {}
        shares = {"scatter_gather": True} if tensor is not None and not splits_tokens else {}
        parallel["pipeline"] = pipeline | waits | shares
    return document | {"model": model, "parallel": parallel}
