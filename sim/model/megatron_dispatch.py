"""How tokens of a rank reach their experts and come back, as Megatron's dispatchers do it.

Letters: T tokens of this rank, H hidden, E experts, k experts per token, N token copies at this rank's experts. Of the
ranks `degree` share the experts, `tensor` share each of them. Code: megatron-core 0.16, moe/token_dispatcher.py.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.model import functional as F
from sim.model import routing as R
from sim.model.calls import Tensor
from sim.model.experts import ExpertParallel, Experts, Groups, rows_of

Layer = Callable[[Tensor, Tensor, Groups], Tensor]
"""The experts of this rank: rows [N, H] and their weights [N] to rows [N, H]."""


class Dispatcher:
    """What both ways share."""

    def __init__(self, experts: Experts, parallel: ExpertParallel) -> None:
        self.experts = experts
        self.parallel = parallel

    def through(self, x: Tensor, weights: Tensor, chosen: Tensor, layer: Layer) -> Tensor:
        """x [T, H], each token through its experts, by weights [T, E] and choices, bool [T, E]."""
        raise NotImplementedError

    def groups(self, tokens: int) -> Groups:
        """This rank's experts, of T tokens on every rank."""
        groups = self.experts.groups_of_rank(tokens, self.parallel.degree)
        return tuple((count, rows * self.parallel.tensor) for count, rows in groups)


class AllToAllDispatcher(Dispatcher):
    """MoEAlltoAllTokenDispatcher: copies of tokens go to the ranks that have their experts."""

    def through(self, x: Tensor, weights: Tensor, chosen: Tensor, layer: Layer) -> Tensor:
        """Copies sent and received live until the end."""
        sent, permuted, places = self._preprocess(x, weights, chosen)
        groups = self.groups(x.shape[0])
        received = self._dispatch(sent, rows_of(groups))
        permuted = self._dispatch(permuted, rows_of(groups))
        out = self._expert_outputs(received, permuted, groups, weights.dtype, layer)
        out = R.all_to_all(out, sent.shape[0], self.parallel.degree)
        if self.experts.permute_fusion:
            return R.unpermute(out, places, x.shape[0])
        return R.scatter_add(out, places, x.shape[0])

    def _preprocess(self, x: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of tokens [T k, H] in the order of experts, their weights [T k], and the way back. Then the host waits
        for the tokens of every expert: dropless, it cannot go on without."""
        F.compute("sum", (self.experts.count,), "int64", chosen)
        counted = F.record_for_host()
        rows = self.experts.sent(x.shape[0])
        fused = self.experts.permute_fusion
        permuted = R.permute(x, weights, chosen, rows) if fused else picked(x, weights, chosen, rows)
        F.wait_on_host(counted)
        return permuted

    def _dispatch(self, x: Tensor, arrives: int) -> Tensor:
        return R.all_to_all(x, arrives // self.parallel.tensor, self.parallel.degree)

    def _expert_outputs(self, received: Tensor, weights: Tensor, groups: Groups, dtype: str, layer: Layer) -> Tensor:
        inputs = self._postprocess(received)
        weights = self._postprocess(weights)
        outputs = layer(inputs, weights, groups)
        return self._combine_preprocess(outputs, dtype)

    def _postprocess(self, x: Tensor) -> Tensor:
        """All tokens of the ranks that share an expert, sorted by expert."""
        p, e = self.parallel, self.experts
        if p.tensor > 1:
            x = R.gather_rows(x, p.tensor, "etp")
        return R.sort_chunks(x, e.permute_fusion) if e.count > p.degree else x

    def _combine_preprocess(self, x: Tensor, dtype: str) -> Tensor:
        p, e = self.parallel, self.experts
        if e.count > p.degree:
            x = R.sort_chunks(x, e.permute_fusion)
        return R.scatter_rows(x.to(dtype), p.tensor, "etp").to(x.dtype) if p.tensor > 1 else x


class AllGatherDispatcher(Dispatcher):
    """MoEAllGatherTokenDispatcher: every rank gets all tokens and picks those of its experts; results are summed and
    scattered. The host reads how many each expert has."""

    def through(self, x: Tensor, weights: Tensor, chosen: Tensor, layer: Layer) -> Tensor:
        p, e, groups = self.parallel, self.experts, self.groups(x.shape[0])
        ranks, group = p.degree * p.tensor, "ep_etp"
        local = e.count // p.degree
        if ranks > 1:
            chosen = R.gather_rows(chosen, ranks, group)
            weights = R.gather_rows(weights, ranks, group)
            x = R.gather_rows(x, ranks, group, buffered=True)
        map_ = chosen.narrow(1, 0, local).contiguous()
        weights = weights.narrow(1, 0, local).contiguous()
        F.compute("sum", (local,), "int64", map_)
        F.read_on_host()
        out, permuted, places = picked(x, weights, map_, rows_of(groups))
        out = layer(out, permuted, groups)
        out = R.scatter_add(out, places, x.shape[0])
        if ranks == 1:
            return out
        return R.scatter_rows(out.to(weights.dtype), ranks, group).to(out.dtype)


class FlexDispatcher(Dispatcher):
    """MoEFlexTokenDispatcher with HybridEP: dispatch and sorting are one function, which waits for the tokens of every
    expert."""

    def through(self, x: Tensor, weights: Tensor, chosen: Tensor, layer: Layer) -> Tensor:
        groups, ranks, tokens = self.groups(x.shape[0]), self.parallel.degree, x.shape[0]
        counted = F.record_for_host()
        unique = self.experts.sent_once(tokens, ranks)
        received, permuted, places = R.flex_dispatch(x, weights, chosen, rows_of(groups), unique, ranks)
        F.wait_on_host(counted)
        out = layer(received, permuted, groups)
        return R.flex_combine(out, places, tokens, ranks)


def picked(x: Tensor, weights: Tensor, chosen: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of x [T, H] in the order of the experts that `chosen` [T, E] gives them, [rows, H], their weights [rows], and
    the tokens' numbers: selections written out."""
    mask = chosen.transpose(0, 1).contiguous()
    numbers = F.compute("arange", (x.shape[0],), "int64")
    places = F.compute("masked_select", (rows,), "int64", mask)
    permuted = R.masked_select(weights.transpose(0, 1).contiguous(), mask, rows)
    out = R.index_select(x, places)
    del numbers
    return out, permuted, places


def dispatcher_of(experts: Experts, parallel: ExpertParallel) -> Dispatcher:
    """The one that the configuration asks for."""
    alone = experts.dispatcher == "flex" and parallel.degree == 1  # nothing is exchanged
    return DISPATCHERS["alltoall" if alone else experts.dispatcher](experts, parallel)


DISPATCHERS = {"alltoall": AllToAllDispatcher, "allgather": AllGatherDispatcher, "flex": FlexDispatcher}
