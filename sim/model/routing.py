"""The operators that models with experts use beside `functional`: choosing, sorting and sending tokens, grouped products."""

from __future__ import annotations

from sim.model.calls import Tensor, call, call_tuple
from sim.model.module import Parameter


def router_logits(x: Tensor, weight: Parameter, dtype: str | None) -> Tensor:
    """Megatron's router: x [S, B, H] times weight [E, H] transposed, in `dtype` (None: x's)."""
    return call("router_logits", x, weight.tensor, dtype)


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last dimension: values and indices."""
    values, indices = call_tuple("top_k", x, k)
    return values, indices


def sigmoid(x: Tensor) -> Tensor:
    return call("sigmoid", x)


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """x.gather(-1, indices)."""
    return call("gather", x, indices)


def scatter(x: Tensor, indices: Tensor, width: int) -> Tensor:
    """zeros [..., width].scatter(-1, indices, x)."""
    return call("scatter", x, indices, width)


def sum_over(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """x.sum(dim, keepdim)."""
    return call("sum_over", x, dim, keepdim)


def divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b."""
    return call("divide", a, b)


def masked_fill(x: Tensor, mask: Tensor) -> Tensor:
    """x.masked_fill(mask, a number)."""
    return call("masked_fill", x, mask)


def masked_select(x: Tensor, mask: Tensor, count: int) -> Tensor:
    """x.masked_select(mask), of which `count` entries are set: [count]."""
    return call("masked_select", x, mask, count)


def index_select(x: Tensor, indices: Tensor) -> Tensor:
    """Rows of x [T, H] by indices [N]: [N, H]."""
    return call("index_select", x, indices)


def scatter_add(x: Tensor, indices: Tensor, rows: int) -> Tensor:
    """zeros [rows, H].scatter_add_(0, indices [N], x [N, H])."""
    return call("scatter_add", x, indices, rows)


def permute(x: Tensor, weights: Tensor, chosen: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Transformer Engine's: a row of x [T, H] and of weights [T, E] for each of a token's experts, and the map back."""
    out, permuted, places = call_tuple("permute", x, weights, chosen, rows)
    return out, permuted, places


def unpermute(x: Tensor, places: Tensor, tokens: int) -> Tensor:
    """Sums of the rows of each token: [tokens, H]."""
    return call("unpermute", x, places, tokens)


def split_rows(x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Parts of so many rows."""
    return call_tuple("split_rows", x, sizes)


def sort_chunks(x: Tensor, fused: bool) -> Tensor:
    """Chunks of x's rows in another order, by one kernel or cut and joined."""
    return call("sort_chunks", x, fused)


def all_to_all(x: Tensor, rows: int, ranks: int) -> Tensor:
    """Rows of x to the ranks of their experts; `rows` come back."""
    return call("all_to_all", x, rows, ranks)


def gather_rows(x: Tensor, ranks: int, group: str, buffered: bool = False) -> Tensor:
    """The rows of all ranks of a group, `buffered` in Megatron's global buffer; backward sums and scatters."""
    return call("gather_rows", x, ranks, group, buffered)


def scatter_rows(x: Tensor, ranks: int, group: str) -> Tensor:
    """This rank's rows of the sum over a group; backward gathers."""
    return call("scatter_rows", x, ranks, group)


def grouped_linear(
    x: Tensor, weights: tuple[Parameter, ...], groups: tuple[tuple[int, int], ...], biases: tuple[Parameter, ...] = ()
) -> Tensor:
    """x [N, in] times each expert's weight [out, in] transposed, and its bias [out], if there are some; `groups`: (experts,
    rows of each) in order."""
    return call("grouped_linear", x, tuple(p.tensor for p in weights), groups, tuple(p.tensor for p in biases))


def fp8_grouped_linear(
    x: Tensor, weights: tuple[Parameter, ...], groups: tuple[tuple[int, int], ...], biases: tuple[Parameter, ...] = ()
) -> Tensor:
    """The same by Transformer Engine in 8 bit."""
    return call("fp8_grouped_linear", x, tuple(p.tensor for p in weights), groups, tuple(p.tensor for p in biases))


def add_expert_biases(
    x: Tensor, biases: tuple[Parameter, ...], weights: Tensor, groups: tuple[tuple[int, int], ...]
) -> Tensor:
    """Rows of x [N, out] plus their expert's bias [out] times their weight [N, 1], one expert after the other."""
    return call("add_expert_biases", x, tuple(bias.tensor for bias in biases), weights, groups)


def flex_dispatch(
    x: Tensor, weights: Tensor, chosen: Tensor, rows: int, unique: int, ranks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """HybridEP: x [T, H] to rows [rows, H] at the experts of this rank, their weights [rows], and the map of the `unique`
    rows that come."""
    out, permuted, places = call_tuple("flex_dispatch", x, weights, chosen, rows, unique, ranks)
    return out, permuted, places


def flex_combine(x: Tensor, places: Tensor, tokens: int, ranks: int) -> Tensor:
    """HybridEP: rows [N, H] back to the ranks of their tokens, summed: [tokens, H]."""
    return call("flex_combine", x, places, tokens, ranks)


def clamp(x: Tensor) -> Tensor:
    """torch.clamp of x between numbers."""
    return call("clamp", x)


def weighted_swiglu(x: Tensor, weights: Tensor) -> Tensor:
    """silu(gate) * value * weight of x [N, 2 F] and weights [N, 1]: [N, F]."""
    return call("weighted_swiglu", x, weights)


def with_auxiliary_loss(x: Tensor, loss: Tensor) -> Tensor:
    """x, whose backward starts that of a scalar loss too."""
    return call("with_auxiliary_loss", x, loss)


def divide_in_place(x: Tensor, other: Tensor) -> Tensor:
    """x /= other."""
    return call("divide_in_place", x, other)


def sort(x: Tensor) -> tuple[Tensor, Tensor]:
    """torch.sort of whole numbers [N]: values and places."""
    values, places = call_tuple("sort", x)
    return values, places


def index_rows(x: Tensor, indices: Tensor) -> Tensor:
    """x[indices]: rows of x."""
    return call("index_rows", x, indices)


def grouped_mm(x: Tensor, weight: Parameter, offsets: Tensor, groups: tuple[tuple[int, int], ...]) -> Tensor:
    """Rows of x [N, in] times the transposed weights [E, out, in] of their experts; `groups`: (experts, rows of each)."""
    return call("grouped_mm", x, weight.tensor, offsets, groups)
