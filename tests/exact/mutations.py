"""Rules of the runtime, broken one at a time. Each function takes pytest's monkeypatch and breaks one of them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sim.model import functional
from sim.model.gpt import GptBlock
from sim.program.program import REDUCE_SCATTER
from sim.runtime import autograd, checkpoint, scratch, train, wrap
from sim.runtime.ops import matmul, pointwise
from sim.runtime.ops.views import T, UnsafeView, View, reshape, view
from sim.runtime.selective import Selective
from sim.runtime.sharding.fsdp2 import Unit
from sim.runtime.sharding.parameters import ParameterGroup, Shards
from sim.runtime.sharding.reduction import Reduction
from sim.runtime.tape import Tape

Patch = pytest.MonkeyPatch


def wrapped(patch: Patch, owner: Any, name: str, around: Any) -> None:
    """Replace owner.name by around(original, *arguments)."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *arguments, **named: around(original, *arguments, **named))


# -- the engine ------------------------------------------------------------------------------------------------
def _deliver(tape: Tape, buffer: dict[int, Any], slot: int, results: list[Any], index: int, in_place: bool) -> None:
    gradient = results[index]
    if gradient is None:
        return
    if slot not in buffer:
        buffer[slot], results[index] = gradient, None
    elif not in_place:
        buffer[slot] = tape.empty(gradient.shape, gradient.dtype, buffer[slot].strides)


def gradients_are_never_added_in_place(patch: Patch) -> None:
    patch.setattr(autograd, "_deliver", lambda *arguments: _deliver(*arguments, in_place=False))


def gradients_are_always_added_in_place(patch: Patch) -> None:
    patch.setattr(autograd, "_deliver", lambda *arguments: _deliver(*arguments, in_place=True))


def unpacked_tensors_outlive_the_bias_sum(patch: Patch) -> None:
    kept: list[Any] = []

    def backward(node: Any, tape: Tape, gradients: Any) -> Any:
        kept[:] = [saved.unpack() for saved in node.saved]
        return node.op.backward(tape, node, gradients, kept)

    patch.setattr(autograd.Node, "backward", backward)


def saved_tensors_die_before_the_bias_sum(patch: Patch) -> None:
    def around(original: Any, node: Any, *arguments: Any) -> Any:
        result = original(node, *arguments)
        node.release()
        return result

    wrapped(patch, autograd.Node, "backward", around)


# -- operators -------------------------------------------------------------------------------------------------
def mm_computes_dx_before_dw(patch: Patch) -> None:
    def backward(tape: Tape, node: Any, gradients: Any, saved: Any) -> Any:
        (m, k), n = node.metas[0][0], node.metas[1][0][1]
        dx = tape.matmul_out("aten::mm", m, k, n, gradients[0].dtype) if node.needs(0) else None
        dw = tape.matmul_out("aten::mm", k, n, m, gradients[0].dtype) if node.needs(1) else None
        if dw is not None:
            (dw.strides,) = node.attributes
        return [dx, dw]

    patch.setattr(matmul.Mm, "backward", staticmethod(backward))


def mul_computes_self_before_other(patch: Patch) -> None:
    def backward(tape: Tape, node: Any, gradients: Any, saved: Any) -> Any:
        other, gradient = saved[0], gradients[0]
        result: list[Any] = [None, None]
        if node.needs(0):
            conjugate = tape.empty(other.shape, other.dtype) if other.dtype == "complex64" else None
            result[0] = tape.empty(gradient.shape, gradient.dtype)
            del conjugate
        if node.needs(1):
            result[1] = tape.empty(gradient.shape, gradient.dtype)
        return result

    patch.setattr(pointwise.Mul, "backward", staticmethod(backward))


def complex_factors_need_no_conjugate_copy(patch: Patch) -> None:
    def around(original: Any, tape: Tape, name: str, *rest: Any) -> Any:
        return None if name == "aten::conj" else original(tape, name, *rest)

    wrapped(patch, Tape, "pointwise", around)


def linear_folds_its_input_before_weight_t(patch: Patch) -> None:
    def linear(tape: Tape, x: Any, weight: Any, bias: Any) -> Any:
        assert bias is None
        folded = reshape(tape, x, (-1, x.shape[-1]))
        w_t = tape.apply(T, (weight,), 0, 1)
        return view(
            tape, tape.apply(matmul.Mm, (folded, w_t), w_t.strides), (*x.shape[:-1], weight.shape[0]), UnsafeView
        )

    patch.setitem(Tape.rules, "linear", linear)


def autocast_casts_left_to_right(patch: Patch) -> None:
    original = Tape.rules["linear"]

    def linear(tape: Tape, x: Any, weight: Any, bias: Any) -> Any:
        if not tape.autocast_dtype:
            return original(tape, x, weight, bias)
        x, weight, bias = (pointwise.autocast_to(tape, t, tape.autocast_dtype) for t in (x, weight, bias))
        folded = reshape(tape, x, (-1, x.shape[-1]))
        w_t = tape.apply(T, (weight,), 0, 1)
        kind, inputs = (matmul.Mm, (folded, w_t)) if bias is None else (matmul.Addmm, (bias, folded, w_t))
        return view(tape, tape.apply(kind, inputs, w_t.strides), (*x.shape[:-1], weight.shape[0]), View)

    patch.setitem(Tape.rules, "linear", linear)


def autocast_caches_nothing(patch: Patch) -> None:
    def cast(tape: Tape, x: Any, dtype: str) -> Any:
        return x if x is None else pointwise.to(tape, x, dtype)

    patch.setattr(matmul, "autocast_to", cast)


def kernels_have_no_temporaries(patch: Patch) -> None:
    patch.setattr(Tape, "scratch", lambda *arguments: None)


def flash_never_splits_keys(patch: Patch) -> None:
    patch.setattr(scratch, "flash_splits", lambda *arguments: 1)


def python_frames_hold_no_attention_tensors(patch: Patch) -> None:
    def forward(self: GptBlock, x: Any) -> Any:
        b, s, h = x.shape
        c = self.config
        parts = list(self.qkv(self.ln1(x)).split(h))
        heads = [parts.pop(0).view(b, s, c.heads, c.head_dim).transpose(1, 2) for _ in range(3)]
        y = functional.attention(*heads, dropout_p=c.dropout, kernel="math" if c.attention == "math" else "sdpa")
        heads.clear()
        x = x + functional.dropout(self.proj(y.transpose(1, 2).contiguous().view(b, s, h)), c.dropout)
        del y
        return x + functional.dropout(self.fc2(functional.gelu(self.fc1(self.ln2(x)))), c.dropout)

    patch.setattr(GptBlock, "forward", forward)


# -- checkpointing ---------------------------------------------------------------------------------------------
def recomputation_runs_to_the_end(patch: Patch) -> None:
    def around(original: Any, frame: Any, *arguments: Any) -> None:
        original(frame, *arguments)
        frame.early_stop = False

    wrapped(patch, checkpoint._Frame, "__init__", around)


def selective_checkpointing_keeps_nothing(patch: Patch) -> None:
    patch.setattr(Selective, "keeps", lambda *arguments: False)


def selective_outputs_die_after_the_recomputation(patch: Patch) -> None:
    def around(original: Any, tape: Tape, frame: Any) -> None:
        original(tape, frame)
        if frame.selective is not None:
            frame.selective._kept.clear()

    wrapped(patch, checkpoint, "_recompute", around)


# -- FSDP2 -----------------------------------------------------------------------------------------------------
def gathered_output_dies_before_the_next_copy_out(patch: Patch) -> None:
    def around(original: Any, group: ParameterGroup, forward: bool) -> None:
        if group.pending is not None:
            group.communication.deferred_gather = None
        original(group, forward)

    wrapped(patch, ParameterGroup, "land", around)


def gathered_output_dies_after_its_own_copy_out(patch: Patch) -> None:
    def around(original: Any, group: ParameterGroup, forward: bool) -> None:
        original(group, forward)
        group.communication.deferred_gather = None

    wrapped(patch, ParameterGroup, "land", around)


class _WithoutLast(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        return None if index == -1 else super().__getitem__(index)


def last_gradient_dies_with_the_others(patch: Patch) -> None:
    def around(original: Any, reduction: Reduction, owners: Any, gradients: list[Any]) -> Any:
        moved = _WithoutLast(gradients)
        gradients.clear()
        return original(reduction, owners, moved)

    wrapped(patch, Reduction, "reduce", around)


def gradients_die_before_the_reduction_begins(patch: Patch) -> None:
    def around(original: Any, reduction: Reduction, owners: Any, gradients: list[Any]) -> Any:
        gradients[:] = [SimpleNamespace(bytes=g.bytes, dtype=g.dtype) for g in gradients]
        return original(reduction, owners, gradients)

    wrapped(patch, Reduction, "reduce", around)


def reduce_input_dies_with_its_unit(patch: Patch) -> None:
    def around(original: Any, unit: Unit) -> None:
        original(unit)
        unit.communication.reduce_inputs.clear()

    wrapped(patch, Unit, "post_backward", around)


def reduce_inputs_live_to_the_end(patch: Patch) -> None:
    def around(original: Any, *arguments: Any, **named: Any) -> Any:
        return replace(original(*arguments, **named), reduce_scatter_buffers=1000)

    wrapped(patch, wrap, "unit_policy", around)


def reduction_begins_before_the_reshard(patch: Patch) -> None:
    drop = ParameterGroup.drop

    def around(original: Any, unit: Unit) -> None:
        with patch.context() as inside:
            inside.setattr(ParameterGroup, "drop", lambda group: None)
            original(unit)
        drop(unit.group)

    wrapped(patch, Unit, "post_backward", around)


def backward_gathers_nothing_ahead(patch: Patch) -> None:
    patch.setattr(Unit, "prefetch", lambda *arguments: None)


def everything_is_on_one_stream(patch: Patch) -> None:
    def around(original: Any, *arguments: Any, stream: int = 0, **named: Any) -> Any:
        return original(*arguments, **named)

    wrapped(patch, Tape, "empty", around)


def kernels_need_no_pointer_tables(patch: Patch) -> None:
    patch.setattr(scratch, "split_copy_table", lambda *arguments: 0)
    patch.setattr(scratch, "chunk_cat_table", lambda *arguments: 0)


def every_gradient_has_its_own_buffer(patch: Patch) -> None:
    def deliver(reduction: Reduction, owners: Any, out: Any, stream: int) -> None:
        for p in owners:
            p.sharded.grad = reduction.tape.empty((p.shard_elements,), out.dtype, stream=REDUCE_SCATTER)

    patch.setattr(Reduction, "_deliver", deliver)


def norms_are_reduced_without_buffers(patch: Patch) -> None:
    wrapped(patch, train, "clip_grad_norm", lambda original, tape, parameters, *_: original(tape, parameters, False))


def parameters_are_never_kept_by_fewer_ranks(patch: Patch) -> None:
    def drop(group: ParameterGroup, ranks: int) -> None:
        for p in group.parameters:
            p.slot.tensor = p.sharded
            p.unsharded.storage.drop()  # type: ignore[union-attr]
        group.shards = Shards.SHARDED

    patch.setattr(ParameterGroup, "shrink", drop)


# -- the script ------------------------------------------------------------------------------------------------
def the_graph_dies_with_an_out_of_memory_error(patch: Patch) -> None:
    def around(original: Any, run: train.TrainingRun, number: int) -> None:
        try:
            original(run, number)
        finally:
            run.loss = None

    wrapped(patch, train.TrainingRun, "step", around)
