"""A published row's label of sharding becomes the family that it names."""

from __future__ import annotations

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
