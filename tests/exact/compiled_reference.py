"""Blocks in PyTorch, and what AOTAutograd saves of them when they are compiled (on a CPU; no code is generated)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

MM = torch.ops.aten.mm.default
VIEWS = {"view", "permute", "alias", "_conj", "expand", "unsqueeze", "squeeze", "slice", "split", "split_with_sizes"}
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class ManualNorm(nn.Module):
    """RMSNorm op by op; `first`: the weight is the first factor (transformers)."""

    def __init__(self, width: int, first: bool = False) -> None:
        super().__init__()
        self.weight, self.first = nn.Parameter(torch.ones(width)), first

    def forward(self, x: Tensor) -> Tensor:
        f = x.float()
        n = (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
        return self.weight * n if self.first else n * self.weight


def rotate_complex(x: Tensor, cache: Tensor) -> Tensor:
    z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(z * cache.view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-b, a), -1) * sin.unsqueeze(1)


class Llama(nn.Module):
    """torchtitan's block (complex rotation, repeated keys) or transformers' (`half`, enable_gqa)."""

    def __init__(self, h: int, heads: int, kv: int, f: int, norm: str, half: bool, bias: bool = False) -> None:
        super().__init__()
        self.d, self.repeat, self.half = h // heads, heads // kv, half
        self.wq, self.wk = nn.Linear(h, h, bias), nn.Linear(h, kv * self.d, bias)
        self.wv, self.wo = nn.Linear(h, kv * self.d, bias), nn.Linear(h, h, False)
        self.w1, self.w2, self.w3 = nn.Linear(h, f, False), nn.Linear(f, h, False), nn.Linear(h, f, False)
        make = nn.RMSNorm if norm == "fused" else lambda width: ManualNorm(width, half)
        self.norm1, self.norm2 = make(h), make(h)

    def attend(self, x: Tensor, *rotation: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (w(x).view(b, s, -1, self.d) for w in (self.wq, self.wk, self.wv))
        if self.half:
            q, k, v = (z.transpose(1, 2) for z in (q, k, v))
            q, k = rotate_half(q, *rotation), rotate_half(k, *rotation)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.repeat > 1)
        else:
            q, k = rotate_complex(q, *rotation), rotate_complex(k, *rotation)
            k, v = (z.unsqueeze(3).expand(b, s, -1, self.repeat, self.d).reshape(b, s, -1, self.d) for z in (k, v))
            y = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)), is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(b, s, -1))

    def forward(self, x: Tensor, *rotation: Tensor) -> Tensor:
        h = x + self.attend(self.norm1(x), *rotation)
        n = self.norm2(h)
        return h + self.w2(F.silu(self.w1(n)) * self.w3(n))


class LoraLinear(nn.Module):
    """torchtune's: a frozen linear layer and a detour of low rank, whose result is scaled; `peft`: scaled last."""

    def __init__(self, base: nn.Linear, rank: int, peft: bool) -> None:
        super().__init__()
        self.base, self.peft = base.requires_grad_(False), peft
        self.a = nn.Linear(base.in_features, rank, False)
        self.b = nn.Linear(rank, base.out_features, False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        detour = self.b(self.a(x))
        return y + (detour * 2.0 if self.peft else 2.0 * detour)


def with_adapters(block: nn.Module, names: tuple[str, ...], rank: int, peft: bool) -> nn.Module:
    """The block frozen, but for adapters around these linear layers."""
    block.requires_grad_(False)
    for name in names:
        setattr(block, name, LoraLinear(getattr(block, name), rank, peft))
    return block


class Gpt(nn.Module):
    """nanoGPT's block."""

    def __init__(self, h: int, heads: int, f: int, bias: bool) -> None:
        super().__init__()
        self.h, self.heads = h, heads
        self.ln1, self.ln2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.proj = nn.Linear(h, 3 * h, bias), nn.Linear(h, h, bias)
        self.fc1, self.fc2 = nn.Linear(h, f, bias), nn.Linear(f, h, bias)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (z.view(b, s, self.heads, -1).transpose(1, 2) for z in self.qkv(self.ln1(x)).split(h, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(b, s, h))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate="tanh"))


def _name(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "__name__", "")).partition(".")[0]


def _is_part_of_a_view(node: torch.fx.Node) -> bool:
    return _name(node) == "getitem" and _name(node.args[0]).startswith("split")  # type: ignore[arg-type]


def _contexts(alternating: bool) -> Any:
    def make() -> Any:
        counts: Counter[bool] = Counter()

        def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            if op == MM and alternating:
                counts[context.is_recompute] += 1
                saves = counts[context.is_recompute] % 2 == 1
            else:
                saves = op == ATTENTION
            return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return make


def saved_bytes(block: nn.Module, inputs: tuple[Tensor, ...], checkpoint: str) -> list[int]:
    """Bytes of each tensor that the compiled block saves beside its parameters, sorted; random states left
    out. Views count as what they are views of."""
    found: list[int] = []

    def forward(graph: torch.fx.GraphModule, _: Any) -> Any:
        (output,) = [node for node in graph.graph.nodes if node.op == "output"]
        kept: dict[Any, int] = {}
        shapes = {p.shape for p in block.parameters()}
        for node in output.args[0][1:]:
            while node.op == "call_function" and (_name(node) in VIEWS or _is_part_of_a_view(node)):
                node = node.args[0]
            value = node.meta["val"]
            kept[node] = value.numel() * value.element_size()
            if value.dtype == torch.uint8 or (node.op == "placeholder" and value.shape in shapes):
                del kept[node]  # a random state, a parameter
        found.extend(kept.values())
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=torch._functorch.partitioners.min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    if checkpoint != "none":
        extra = {"context_fn": _contexts(True)} if checkpoint == "selective" else {}
        block = checkpoint_wrapper(block, preserve_rng_state=False, **extra)
    torch._dynamo.reset()
    torch.compile(block, backend=backend, fullgraph=True, dynamic=False)(*inputs).sum().backward()
    return sorted(found)
