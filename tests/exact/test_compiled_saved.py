"""What a compiled block saves is what torch's own partitioner chooses, tensor by tensor: shapes, norms, policies, models.

The truth is torch.compile up to min_cut_rematerialization_partition with Inductor's decompositions, run in the test.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sim.model.config import Lora  # noqa: E402
from tests.exact import compiled_reference as reference  # noqa: E402
from tests.exact.compiled_plans import plan_of  # noqa: E402

B, S = 2, 128
SHAPES = {"gqa": (256, 8, 2, 768), "mha": (256, 4, 4, 640), "wide": (128, 2, 1, 1536)}
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16}


def simulated(code: str, shape: tuple[int, ...], checkpoint: str, dtype: str = "bf16", **choices: Any) -> list[int]:
    """Bytes of each tensor that our block saves beside its parameters, sorted, from 64 B on."""
    names = ("hidden", "heads", "kv_heads", "ffn_hidden")
    named = dict(zip(names, shape)) | {"micro_batch": B, "seq_len": S}
    plan = plan_of(code, named, checkpoint, dtype, **choices)
    return sorted(value.bytes for value in plan.saved if not value.parameter and value.bytes >= 64)


def inputs_of(h: int, heads: int, dtype: str, kind: str) -> tuple[Any, ...]:
    x = torch.randn(B, S, h, dtype=TORCH[dtype], requires_grad=True)
    if kind == "complex":
        return (x, torch.randn(S, h // heads // 2, dtype=torch.complex64))
    return (x, *(torch.randn(1, S, h // heads, dtype=TORCH[dtype]) for _ in range(2))) if kind == "half" else (x,)


@pytest.mark.parametrize("checkpoint", ["none", "full", "selective"])
@pytest.mark.parametrize("norm", ["fused", "manual"])
@pytest.mark.parametrize("shape", SHAPES)
def test_torchtitans_block(shape: str, norm: str, checkpoint: str) -> None:
    h, heads, kv, f = SHAPES[shape]
    block = reference.Llama(h, heads, kv, f, norm, half=False).to(torch.bfloat16)
    truth = reference.saved_bytes(block, inputs_of(h, heads, "bf16", "complex"), checkpoint)
    assert simulated("torchtitan", SHAPES[shape], checkpoint, norm=norm) == truth


@pytest.mark.parametrize("checkpoint", ["none", "full", "selective"])
@pytest.mark.parametrize("norm", ["fused", "manual"])
def test_transformers_block(norm: str, checkpoint: str) -> None:
    h, heads, kv, f = SHAPES["mha"]
    block = reference.Llama(h, heads, kv, f, norm, half=True).to(torch.float16)
    truth = reference.saved_bytes(block, inputs_of(h, heads, "fp16", "half"), checkpoint)
    assert simulated("transformers", SHAPES["mha"], checkpoint, "fp16", norm=norm) == truth


@pytest.mark.parametrize("checkpoint", ["none", "full", "selective"])
@pytest.mark.parametrize("bias", [False, True])
def test_nanogpts_block(bias: bool, checkpoint: str) -> None:
    """But for the statistics of its norms, which are bf16 on a CPU and fp32 on a GPU."""
    h, heads, _, f = SHAPES["mha"]
    block = reference.Gpt(h, heads, f, bias).to(torch.bfloat16)
    truth = reference.saved_bytes(block, inputs_of(h, heads, "bf16", "none"), checkpoint)
    ours = simulated("nanogpt", SHAPES["mha"], checkpoint, bias=bias)
    assert [n for n in ours if n != 4 * B * S] == [n for n in truth if n != 2 * B * S]


ADAPTED = {"q and v": (("q", "v"), ("wq", "wv")), "all": (("all",), ("wq", "wk", "wv", "wo", "w1", "w2", "w3"))}


@pytest.mark.parametrize("checkpoint", ["none", "full", "selective"])
@pytest.mark.parametrize("targets", ADAPTED)
@pytest.mark.parametrize("code", ["torchtitan", "transformers"])
def test_a_block_with_adapters(code: str, targets: str, checkpoint: str) -> None:
    """Frozen weights need no gradient; what only they would need is not kept."""
    h, heads, kv, f = SHAPES["gqa"]
    ours, names = ADAPTED[targets]
    half = code == "transformers"
    block = reference.with_adapters(reference.Llama(h, heads, kv, f, "fused", half=half), names, 8, half).to(
        torch.bfloat16
    )
    truth = reference.saved_bytes(block, inputs_of(h, heads, "bf16", "half" if half else "complex"), checkpoint)
    lora = Lora(rank=8, targets=ours, dtype="bf16")
    assert simulated(code, SHAPES["gqa"], checkpoint, norm="fused", lora=lora) == truth
