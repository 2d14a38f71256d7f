"""The operators that models use beside a tensor's own methods, named as in torch.nn.functional."""

from __future__ import annotations

from sim.model.calls import Shape, Tensor, call
from sim.model.module import Parameter


def linear(x: Tensor, weight: Parameter, bias: Parameter | None = None) -> Tensor:
    """x [..., in] times weight [out, in] transposed, plus bias [out]."""
    result: Tensor = call("linear", x, weight.tensor, bias.tensor if bias is not None else None)
    return result


def conv1d_linear(x: Tensor, weight: Parameter, bias: Parameter) -> Tensor:
    """transformers' Conv1D: addmm(bias, x.view(-1, in), weight [in, out])."""
    result: Tensor = call("conv1d_linear", x, weight.tensor, bias.tensor)
    return result


def embedding(indices: Tensor, weight: Parameter) -> Tensor:
    """Rows of weight [V, H] for indices [...]."""
    result: Tensor = call("embedding", indices, weight.tensor)
    return result


def rms_norm(x: Tensor, weight: Parameter) -> Tensor:
    """One fused kernel over the last dimension."""
    result: Tensor = call("rms_norm", x, weight.tensor)
    return result


def layer_norm(x: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:
    result: Tensor = call("layer_norm", x, weight.tensor, bias.tensor if bias is not None else None)
    return result


def scale_by(x: Tensor, weight: Parameter, weight_first: bool = False) -> Tensor:
    """x * weight over the last dimension (weight * x where the imitated code writes it so)."""
    if weight_first:
        result: Tensor = call("mul", weight.tensor, x)
    else:
        result = call("mul", x, weight.tensor)
    return result


def add_bias(x: Tensor, bias: Parameter) -> Tensor:
    """x + bias over the last dimension."""
    result: Tensor = call("add", x, bias.tensor)
    return result


def silu(x: Tensor) -> Tensor:
    result: Tensor = call("silu", x)
    return result


def gelu(x: Tensor) -> Tensor:
    """One kernel, erf or tanh form alike."""
    result: Tensor = call("gelu", x)
    return result


def tanh(x: Tensor) -> Tensor:
    result: Tensor = call("tanh", x)
    return result


def pow3(x: Tensor) -> Tensor:
    """torch.pow(x, 3.0)."""
    result: Tensor = call("pow3", x)
    return result


def dropout(x: Tensor, p: float) -> Tensor:
    """The identity where p is 0."""
    result: Tensor = call("dropout", x, p)
    return result


def softmax(x: Tensor, dtype: str | None = None) -> Tensor:
    """Over the last dimension, in `dtype` (default: x's)."""
    result: Tensor = call("softmax", x, dtype)
    return result


def masked_fill(x: Tensor, mask: Tensor) -> Tensor:
    """x where mask is false, a constant elsewhere; mask broadcasts."""
    result: Tensor = call("masked_fill", x, mask)
    return result


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """[n, m, k] x [n, k, o]."""
    result: Tensor = call("bmm", a, b)
    return result


def scaled_bmm(a: Tensor, b: Tensor) -> Tensor:
    """torch.baddbmm with beta 0 and a scale alpha: [n, m, k] x [n, k, o] times the scale."""
    result: Tensor = call("scaled_bmm", a, b)
    return result


def parallel_linear(x: Tensor, weight: Parameter, bias: Parameter | None = None) -> Tensor:
    """Megatron's linear layer as one node of the graph: x [..., in] times weight [out, in] transposed, plus bias."""
    result: Tensor = call("parallel_linear", x, weight.tensor, bias.tensor if bias is not None else None)
    return result


def causal_softmax(scores: Tensor) -> Tensor:
    """Megatron's fused scale, causal mask and softmax over scores [n, S, S], in their dtype."""
    result: Tensor = call("causal_softmax", scores)
    return result


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Megatron's unfused loss, in fp32: negative log likelihood per token of logits [S, B, V] at targets [S, B]."""
    result: Tensor = call("vocab_parallel_cross_entropy", logits, targets)
    return result


def attention(q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float = 0.0, kernel: str = "sdpa") -> Tensor:
    """Causal scaled_dot_product_attention over [B, heads, S, D]; kernel "sdpa" (what PyTorch picks) or "math"."""
    result: Tensor = call("attention", q, k, v, dropout_p, kernel)
    return result


def cat_last(parts: tuple[Tensor, ...]) -> Tensor:
    """torch.cat(parts, dim=-1)."""
    result: Tensor = call("cat_last", parts)
    return result


def view_as_complex(x: Tensor) -> Tensor:
    """[..., D] fp32 seen as [..., D/2] complex64 (through a [..., D/2, 2] view)."""
    result: Tensor = call("view_as_complex", x)
    return result


def view_as_real(z: Tensor) -> Tensor:
    """[..., D/2] complex64 seen as [..., D] fp32."""
    result: Tensor = call("view_as_real", z)
    return result


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log likelihood of logits [N, V] at targets [N]."""
    result: Tensor = call("cross_entropy", logits, targets)
    return result


def empty(shape: Shape, dtype: str) -> Tensor:
    """An uninitialized tensor; also what a kernel without inputs fills (zeros, arange, ones)."""
    result: Tensor = call("empty", shape, dtype)
    return result


def workspace(shape: Shape, dtype: str) -> Tensor:
    """An uninitialized tensor that counts as workspace."""
    result: Tensor = call("workspace", shape, dtype)
    return result


def compute(name: str, shape: Shape, dtype: str, *inputs: Tensor) -> Tensor:
    """An operator on data that needs no gradient (ids, positions): one output, one kernel that reads `inputs`."""
    result: Tensor = call("compute", name, shape, dtype, inputs)
    return result


def cumsum(x: Tensor) -> Tensor:
    """bool or integer x.cumsum(-1), as int64."""
    result: Tensor = call("cumsum", x)
    return result


def read_on_host() -> None:
    """A value is read from the device (.item(), bool(tensor)): the host waits for all that was launched."""
    call("read_on_host")
