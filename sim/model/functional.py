"""The operators that models use beside a tensor's own methods, named as in torch.nn.functional or in their own library."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sim.model.calls import Shape, Tensor, call
from sim.model.module import Parameter
from sim.model.shard.context import ContextParallel

if TYPE_CHECKING:
    from sim.model.quantized import Nf4Weight


def linear(x: Tensor, weight: Parameter, bias: Parameter | None = None) -> Tensor:
    """x [..., in] times weight [out, in] transposed, plus bias [out]."""
    return call("linear", x, weight.tensor, bias.tensor if bias is not None else None)


def float8_linear(x: Tensor, weight: Parameter, bias: Parameter | None = None) -> Tensor:
    """torchao's Float8Linear, run eagerly: three products of 8-bit casts."""
    return call("float8_linear", x, weight.tensor, bias.tensor if bias is not None else None)


def nf4_linear(x: Tensor, weight: Nf4Weight) -> Tensor:
    """x [..., in] times a four-bit weight [out, in], dequantized for the product."""
    return call("nf4_linear", x, weight)


def conv1d_linear(x: Tensor, weight: Parameter, bias: Parameter) -> Tensor:
    """transformers' Conv1D: addmm(bias, x.view(-1, in), weight [in, out])."""
    return call("conv1d_linear", x, weight.tensor, bias.tensor)


def embedding(indices: Tensor, weight: Parameter) -> Tensor:
    """Rows of weight [V, H] for indices [...]."""
    return call("embedding", indices, weight.tensor)


def rms_norm(x: Tensor, weight: Parameter) -> Tensor:
    """One fused kernel over the last dimension."""
    return call("rms_norm", x, weight.tensor)


def layer_norm(x: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:
    return call("layer_norm", x, weight.tensor, bias.tensor if bias is not None else None)


def persistent_rms_norm(x: Tensor, weight: Parameter) -> Tensor:
    """rms_norm by a kernel that keeps a row in registers (Transformer Engine)."""
    return call("persistent_rms_norm", x, weight.tensor)


def persistent_layer_norm(x: Tensor, weight: Parameter, bias: Parameter) -> Tensor:
    """layer_norm by a kernel that keeps a row in registers (apex's FastLayerNorm, Transformer Engine)."""
    return call("persistent_layer_norm", x, weight.tensor, bias.tensor)


def scale_by(x: Tensor, weight: Parameter, weight_first: bool = False) -> Tensor:
    """x * weight over the last dimension (weight * x where the imitated code writes it so)."""
    return call("mul", weight.tensor, x) if weight_first else call("mul", x, weight.tensor)


def add_bias(x: Tensor, bias: Parameter) -> Tensor:
    """x + bias over the last dimension."""
    return call("add", x, bias.tensor)


def silu(x: Tensor) -> Tensor:
    return call("silu", x)


def gelu(x: Tensor) -> Tensor:
    """One kernel, erf or tanh form alike."""
    return call("gelu", x)


def relu(x: Tensor) -> Tensor:
    return call("relu", x)


def tanh(x: Tensor) -> Tensor:
    return call("tanh", x)


def pow3(x: Tensor) -> Tensor:
    """torch.pow(x, 3.0)."""
    return call("pow3", x)


def dropout(x: Tensor, p: float) -> Tensor:
    """The identity where p is 0."""
    return call("dropout", x, p)


def softmax(x: Tensor, dtype: str | None = None) -> Tensor:
    """Over the last dimension, in `dtype` (default: x's)."""
    return call("softmax", x, dtype)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """[n, m, k] x [n, k, o]."""
    return call("bmm", a, b)


def scaled_bmm(a: Tensor, b: Tensor) -> Tensor:
    """torch.baddbmm with beta 0 and a scale alpha: [n, m, k] x [n, k, o] times the scale."""
    return call("scaled_bmm", a, b)


def parallel_linear(
    x: Tensor, weight: Parameter, bias: Parameter | None = None, ranks: int = 1, gathers_tokens: bool = False,
    overlaps: bool = True,
) -> Tensor:  # fmt: skip
    """Megatron's linear layer as one node of the graph: x [..., in] times weight [out, in] transposed, plus bias.

    ranks above 1: the columns are split, so that backward sums the input's gradient over the ranks; `gathers_tokens`:
    x holds [S/ranks, ...] tokens, gathered before each product and reduce-scattered in backward. `overlaps`: the sum goes
    on beside the product for the weight's gradient.
    """
    given = bias.tensor if bias is not None else None
    return call("parallel_linear", x, weight.tensor, given, ranks, gathers_tokens, overlaps)


def gather_sequence(x: Tensor, ranks: int) -> Tensor:
    """All tokens [B, S, H] of each rank's [B, S/ranks, H] (DTensor: Shard(1) to Replicate); x where there is one rank."""
    return x if ranks == 1 else call("gather_sequence", x, ranks)


def scatter_sequence(x: Tensor, ranks: int) -> Tensor:
    """Each rank's tokens [B, S/ranks, H] of the ranks' sum [B, S, H] (Partial to Shard(1)); x where there is one rank."""
    return x if ranks == 1 else call("scatter_sequence", x, ranks)


def parallel_cross_entropy(logits: Tensor, targets: Tensor, ranks: int) -> Tensor:
    """Mean loss of [N, V/ranks] logits, whose vocabulary the ranks share (loss_parallel)."""
    return call("parallel_cross_entropy", logits, targets, ranks)


def fp8_linear(
    x: Tensor, weight: Parameter, bias: Parameter | None, gamma: Parameter | None, beta: Parameter | None,
    parallel: tuple[str, int, bool],
) -> Tensor:  # fmt: skip
    """Transformer Engine's linear layer in 8 bit: x [..., in], after a norm with weight gamma and bias beta (or none),
    times weight [out, in] transposed. `parallel`: column, row or none; ranks; do they share tokens between layers?"""
    given = (p.tensor if p is not None else None for p in (weight, bias, gamma, beta))
    return call("fp8_linear", x, *given, parallel)


def fp8_layers_begin(x: Tensor) -> Tensor:
    """All layers with 8-bit products follow; x passes on."""
    return call("fp8_layers_begin", x)


def fp8_layers_end(x: Tensor) -> Tensor:
    """They have run."""
    return call("fp8_layers_end", x)


def all_reduce(x: Tensor, ranks: int) -> Tensor:
    """The sum over a tensor-parallel group, in place; the gradient passes on."""
    return call("all_reduce", x, ranks)


def reduce_scatter_tokens(x: Tensor, ranks: int) -> Tensor:
    """This rank's [S/ranks, ...] tokens of the sum over the group of x [S, ...]; backward gathers."""
    return call("reduce_scatter_tokens", x, ranks)


def gather_widths(x: Tensor, ranks: int) -> Tensor:
    """[..., w * ranks] of the group's parts [..., w]; backward takes this rank's part."""
    return call("gather_widths", x, ranks)


def scatter_tokens(x: Tensor, ranks: int) -> Tensor:
    """This rank's tokens of x [S, ...], which all ranks hold, as a view; backward gathers."""
    return call("scatter_tokens", x, ranks)


def clone(x: Tensor) -> Tensor:
    """A copy in plain order."""
    return call("clone", x)


def embedding_of_shard(indices: Tensor, weight: Parameter) -> Tensor:
    """Rows of a shard [V/t, H] of the vocabulary; zeros for indices outside it."""
    return call("embedding_of_shard", indices, weight.tensor)


def bias_gelu(x: Tensor, bias: Parameter) -> Tensor:
    """Megatron's fused gelu(x + bias); keeps x."""
    return call("bias_gelu", x, bias.tensor)


def bias_dropout_add(x: Tensor, bias: Parameter | None, residual: Tensor, p: float) -> Tensor:
    """Megatron's fused residual + dropout(x + bias); keeps the mask."""
    return call("bias_dropout_add", x, bias.tensor if bias is not None else None, residual, p)


def swiglu(x: Tensor) -> Tensor:
    """Megatron's fused silu(gate) * value over x [..., 2 F], gate and value side by side: [..., F]; keeps x."""
    return call("swiglu", x)


def stored_swiglu(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """swiglu (times weights [N, 1] of tokens) that keeps x in 8 bit."""
    return call("stored_swiglu", x, weights)


def squared_relu(x: Tensor) -> Tensor:
    """Megatron's relu(x) ** 2 in one kernel; keeps x."""
    return call("squared_relu", x)


def fused_rope(x: Tensor, angles: Tensor) -> Tensor:
    """Transformer Engine's rotary positions in one kernel: x [S, B, heads, D] by angles [S, 1, 1, D], a new tensor."""
    return call("fused_rope", x, angles)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, context: ContextParallel, window: int = 0) -> Tensor:
    """Transformer Engine's causal attention, q [S, B, A, D] over k and v [S, B, K, D] of all context-parallel ranks: as q.
    All in plain order. `window`: keys that a query sees at most (0: all), on one rank alone."""
    return call("fused_attention", q, k, v, context.degree, context.kind, window)


def tiled(function: Callable[[Tensor], Tensor], x: Tensor, tiles: int) -> Tensor:
    """A function of tokens [B, S, H], run tile by tile along S, forward without a graph and again in backward."""
    return function(x) if tiles == 1 else call("tiled", function, x, tiles)


def exchange_parts(x: Tensor, ranks: int) -> Tensor:
    """x [ranks, ...]: part r goes to context-parallel rank r, and the parts meant for this one come back."""
    return call("exchange_parts", x, ranks)


def causal_softmax(scores: Tensor) -> Tensor:
    """Megatron's fused scale, causal mask and softmax over scores [n, S, S], in their dtype."""
    return call("causal_softmax", scores)


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, ranks: int = 1, fusion: str = "none") -> Tensor:
    """Megatron's unfused loss, in fp32: negative log likelihood per token of logits [S, B, V/ranks] at targets [S, B]."""
    return call("vocab_parallel_cross_entropy", logits, targets, ranks, fusion)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float = 0.0, kernel: str = "sdpa", causal: bool = True
) -> Tensor:
    """scaled_dot_product_attention over [B, heads, S, D], is_causal or without a mask; kernel "sdpa" (what PyTorch picks)
    or "math"."""
    return call("attention", q, k, v, dropout_p, kernel, causal)


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout_p: float) -> Tensor:
    """scaled_dot_product_attention over [B, heads, S, D] with a bias [1, heads, Q, K] on its scores."""
    return call("biased_attention", q, k, v, bias, dropout_p)


def where(condition: Tensor, x: Tensor) -> Tensor:
    """torch.where(condition, x, number)."""
    return call("where", condition, x)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """torch.matmul of [B, heads, m, k] and [B, heads, k, n]."""
    return call("matmul", a, b)


def patch_convolution(x: Tensor, weight: Parameter, bias: Parameter) -> Tensor:
    """F.conv2d of x [B, C, I, I] with a kernel [H, C, P, P] and stride P."""
    return call("patch_convolution", x, weight.tensor, bias.tensor)


def cat(parts: tuple[Tensor, ...], dim: int) -> Tensor:
    """torch.cat(parts, dim)."""
    return call("cat", parts, dim)


def cat_last(parts: tuple[Tensor, ...]) -> Tensor:
    """torch.cat(parts, dim=-1)."""
    return call("cat_last", parts)


def view_as_complex(x: Tensor) -> Tensor:
    """[..., D] fp32 seen as [..., D/2] complex64 (through a [..., D/2, 2] view)."""
    return call("view_as_complex", x)


def view_as_real(z: Tensor) -> Tensor:
    """[..., D/2] complex64 seen as [..., D] fp32."""
    return call("view_as_real", z)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log likelihood of logits [N, V] at targets [N]."""
    return call("cross_entropy", logits, targets)


def require_gradient(x: Tensor) -> Tensor:
    """x.requires_grad_(True) on a tensor that has none."""
    return call("require_gradient", x)


def empty(shape: Shape, dtype: str) -> Tensor:
    """An uninitialized tensor; also what a kernel without inputs fills (zeros, arange, ones)."""
    return call("empty", shape, dtype)


def global_buffer(elements: int, dtype: str) -> None:
    """Megatron's global memory buffer: one tensor per process, made at the first use, kept for good, replaced by a larger
    one."""
    call("global_buffer", elements, dtype)


def compute(name: str, shape: Shape, dtype: str, *inputs: Tensor) -> Tensor:
    """An operator on data that needs no gradient (ids, positions): one output, one kernel that reads `inputs`."""
    return call("compute", name, shape, dtype, inputs)


def run_in_place(name: str, x: Tensor) -> None:
    """An operator that writes into x, which needs no gradient."""
    call("run_in_place", name, x)


def zeros(shape: Shape, dtype: str, requires_grad: bool = False) -> Tensor:
    """torch.zeros, a leaf of the graph where it requires a gradient."""
    return call("zeros", shape, dtype, requires_grad)


def cumsum(x: Tensor, dtype: str = "int64") -> Tensor:
    """bool or integer x.cumsum(-1, dtype=dtype)."""
    return call("cumsum", x, dtype)


def read_on_host() -> None:
    """A value is read from the device (.item(), bool(tensor)): the host waits for all that was launched."""
    call("read_on_host")


def record_for_host() -> Any:
    """An event behind what the device was given so far, for `wait_on_host`."""
    return call("record_for_host")


def wait_on_host(event: Any) -> None:
    """The host waits for an event: what was copied to it asynchronously is there."""
    call("wait_on_host", event)
