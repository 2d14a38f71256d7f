"""A published row's label of sharding becomes the family that it names."""

from __future__ import annotations

import pytest

from tests.unit.test_rows import assumed, document, reason


def test_families_of_sharding() -> None:
    assert document()["parallel"] == {"fsdp": {"degree": 8}}
    assert document(fsdp_or_zero="fsdp1")["parallel"] == {"fsdp1": {"degree": 8}}
    assert document(fsdp_or_zero="zero3")["parallel"] == {"zero": {"degree": 8, "stage": 3}}
    assert "ZeRO-3 played as FSDP2" in assumed(fsdp_or_zero="gemini (zero3-like)")
    kept = document(fsdp_or_zero="fsdp1 (SHARD_GRAD_OP)")["parallel"]["fsdp1"]
    assert kept == {"degree": 8, "strategy": "shard_grad_op"}
    hybrid = document(fsdp_or_zero="fsdp1 hsdp", num_gpus="16", dp="16", global_batch="64")["parallel"]
    assert hybrid == {"fsdp1": {"degree": 8, "replicas": 2}}
    assert document(num_gpus="1", dp="1", fsdp_or_zero="none")["parallel"] == {}
    assert document(fsdp_or_zero="ddp")["parallel"] == {"ddp": {"degree": 8}}
    zero = document(fsdp_or_zero="zero2")
    assert zero["parallel"] == {"zero": {"degree": 8, "stage": 2}}
    assert zero["precision"] == {"parameters": "bf16", "compute": "bf16", "reduce": "bf16"}
    assert document(fsdp_or_zero="zero3", source="LOMO")["parallel"]["zero"] == {
        "degree": 8, "stage": 3, "reduce_bucket_size": 65536, "prefetch_bucket_size": 58982, "persistence_threshold": 2560,
    }  # fmt: skip
    assert "sharding gemini is not known" in reason(fsdp_or_zero="gemini")


@pytest.mark.parametrize(
    ("features", "liger", "tiles"),
    [
        ("baseline", None, None),
        ("+tiled logits&loss (Liger)", ["fused_linear_cross_entropy"], None),
        ("+Ulysses SP", ["fused_linear_cross_entropy"], None),
        ("+Ulysses SP +tiled MLP", ["fused_linear_cross_entropy"], 16),
        ("+Ulysses SP +act ckpt offload", ["fused_linear_cross_entropy"], None),
        ("all features", ["fused_linear_cross_entropy"], 16),
    ],
)
def test_arctics_features_are_fields(features: str, liger: list[str] | None, tiles: int | None) -> None:
    """Its loss comes with all that follow in its table; tiles are tokens of a rank over the hidden size."""
    given = document(
        source="Arctic Long Sequence Training (arXiv 2506.13996)", notes=f"feature set: {features}; K=1000", dp="1",
        cp="Ulysses SP=8", fsdp_or_zero="zero3", micro_batch="1", global_batch="", seq_len="32768", offload="optimizer_cpu",
    )  # fmt: skip
    assert given["parallel"]["context"] == {"degree": 8, "kind": "ulysses"}
    zero = given["parallel"]["zero"]
    assert (zero["degree"], zero["stage"], zero["offload_optimizer"]) == (1, 3, "cpu")
    assert (given["model"].get("liger"), given["model"].get("mlp_tiles")) == (liger, tiles)
    assert given["allocator"] == "expandable_segments:True"
