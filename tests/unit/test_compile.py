"""torch.compile in scenarios: what it changes, what is refused, and that a region leaves nothing behind."""

from __future__ import annotations

import numpy as np
import pytest

from sim.program.kernels import Memory
from sim.program.program import Mem, Owner, Program, Row
from sim.runtime.record import record
from sim.scenario import load_text
from sim.scenario.problems import ScenarioError

TINY = """
model: {preset: PRESET, implementation: CODE, layers: 4}
cluster: {gpu: h100, gpus_per_node: 1}
batch: {micro_batch: 1, seq_len: 256}
precision: {parameters: bf16, compute: bf16}
"""
CODES = {"torchtitan": "llama-tiny", "transformers": "llama-tiny", "nanogpt": "gpt-tiny"}
EIGHT = (
    TINY.replace("PRESET", "llama-tiny")
    .replace("CODE", "torchtitan")
    .replace("compute: bf16", "compute: bf16, float8: tensorwise")
)
GPT2 = TINY.replace("PRESET", "gpt-tiny").replace("CODE", "transformers")


def program(code: str, extra: str = "") -> Program:
    text = TINY.replace("PRESET", CODES.get(code, "gpt-tiny")).replace("CODE", code) + extra
    return record(load_text(text, "compile").strategies[0], 2)


def saved_bytes(p: Program) -> int:
    """Activations alive at the end of the first forward."""
    end = next(mark.memory_events for mark in p.marks if mark.name == "s0.fwd0")
    kinds, handles = p.mem_kind[:end], p.mem_handle[:end]
    freed = set(handles[kinds == Mem.FREE].tolist())
    owners = list(p.owners)
    sizes = p.mem_bytes[:end]
    return sum(
        int(size)
        for kind, handle, size in zip(kinds.tolist(), handles.tolist(), sizes.tolist())
        if kind == Mem.ALLOC and handle not in freed and owners[handle] in (Owner.ACTIVATION, Owner.CHECKPOINT)
    )


def moved_bytes(p: Program) -> int:
    """Of kernels that memory bounds."""
    kernels = (p.kernels[a].work for k, a in zip(p.row_kind.tolist(), p.row_argument.tolist()) if k == Row.LAUNCH)
    return sum(work.bytes for work in kernels if isinstance(work, Memory))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    "checkpoint", ["", "checkpoint: {}\n", "checkpoint: {save: [attention, every_second_matmul]}\n"]
)
def test_compiled_blocks_move_and_save_less(code: str, checkpoint: str) -> None:
    eager, compiled = program(code, checkpoint), program(code, checkpoint + "compile: {}\n")
    assert moved_bytes(compiled) < 1.001 * moved_bytes(eager)  # nanogpt's own kernels are fused already
    assert saved_bytes(compiled) <= saved_bytes(eager)


def test_with_scales_per_row_gradients_of_weights_are_scaled_after_their_products() -> None:
    """A kernel for each of a layer's seven, but one for w1 and w3, which are alike and read the same scales of their input;
    none with one scale per tensor."""
    scaled = {}
    for recipe in ("tensorwise", "rowwise"):
        more = f"compile: {{}}\nstrategies: {{a: {{precision: {{float8: {recipe}}}}}}}\n"
        p = program("torchtitan", more)
        rows = p.row_argument[p.row_kind == Row.LAUNCH].tolist()
        scaled[recipe] = sum(p.kernels[row].name == "triton_poi_fused_mul" for row in rows)
    assert scaled == {"tensorwise": 0, "rowwise": 2 * 4 * 6}


@pytest.mark.parametrize("code", CODES)
def test_products_and_attention_are_those_of_eager_mode(code: str) -> None:
    def launched(p: Program) -> list[str]:
        names = [p.kernels[argument].name for kind, argument in zip(p.row_kind, p.row_argument) if kind == 0]
        kinds = [n for n in names if n.startswith(("aten::mm", "aten::addmm", "aten::_flash"))]
        return sorted(kinds)

    assert launched(program(code)) == launched(program(code, "compile: {}\n"))


def test_eager_float8_saves_as_much_as_16_bit_and_moves_far_more() -> None:
    """torchao keeps 16-bit inputs for backward and casts again; eagerly each cast goes through fp32 copies."""
    eager = record(load_text(EIGHT, "float8").strategies[0], 2)
    plain = record(load_text(EIGHT.replace(", float8: tensorwise", ""), "float8").strategies[0], 2)
    assert saved_bytes(eager) == saved_bytes(plain)
    assert moved_bytes(eager) > 2 * moved_bytes(plain)


def test_nothing_of_a_region_outlives_its_step() -> None:
    p = program("torchtitan", "compile: {}\ncheckpoint: {}\n")
    first, second = (next(m.memory_events for m in p.marks if m.name == f"s{n}.end") for n in (0, 1))

    def alive(end: int) -> int:
        kinds = p.mem_kind[:end]
        return int(np.sum(kinds == Mem.ALLOC) - np.sum(kinds == Mem.FREE))

    assert alive(first) == alive(second)


def test_a_compiled_loss_keeps_the_logits_alone() -> None:
    """Of 16-bit logits eager mode makes fp32 copies: theirs, their log probabilities', the gradients'."""

    def loss_bytes(p: Program) -> int:
        sizes = zip(p.mem_bytes.tolist(), list(p.owners), p.mem_kind.tolist(), p.mem_handle.tolist())
        return sum(size for size, _, kind, handle in sizes if kind == Mem.ALLOC and p.owners[handle] == Owner.LOSS)

    eager, compiled = program("torchtitan", "compile: {}\n"), program("torchtitan", "compile: {loss: true}\n")
    assert moved_bytes(compiled) < moved_bytes(eager)
    assert loss_bytes(compiled) < loss_bytes(eager) / 2


REFUSED = {
    "megatron": (TINY.replace("PRESET", "gpt-tiny").replace("CODE", "megatron"), "compile: {}", "megatron's gpt blocks"),
    "fp32": (TINY.replace("PRESET", "llama-tiny").replace("CODE", "torchtitan").replace("bf16", "fp32"), "compile: {}", "fp32"),
    "old GPU": (GPT2.replace("h100", "v100").replace("bf16", "fp16"), "compile: {}", "compute capability 8.0"),
    "segments": (GPT2, "compile: {}\ncheckpoint: {segment: 2}", "whole layers"),
    "reentrant": (GPT2, "compile: {}\ncheckpoint: {reentrant: true}", "whole layers"),
    "per layer": (GPT2, "compile: {}\ncheckpoint: {layers: [{inside: mlp}, none]}", "as a whole"),
    "offload": (GPT2, "compile: {}\noffload: {what: saved_tensors}", "eager mode only"),
    "math attention": (GPT2.replace("layers: 4", "layers: 4, attention: math"), "compile: {}", "flash attention only"),
    "checkpoint outside": (
        GPT2.replace("gpus_per_node: 1", "gpus_per_node: 2"),
        "compile: {}\nparallel: {fsdp: {degree: 2, wrap: checkpoint(fsdp)}}",
        "FSDP is outside",
    ),
    "FSDP1": (
        GPT2.replace("gpus_per_node: 1", "gpus_per_node: 2").replace("transformers", "nanogpt"),
        "compile: {}\nparallel: {fsdp1: {degree: 2}}",
        "eager mode only",
    ),
    "float8 of another code": (GPT2.replace("compute: bf16", "compute: bf16, float8: tensorwise"), "", "eager mode for Llama"),
    "rows scaled in eager mode": (EIGHT.replace("float8: tensorwise", "float8: rowwise"), "", "or use tensorwise"),
    "kept outputs beside eager float8": (EIGHT, "checkpoint: {save: [attention]}", "in compiled blocks: add compile"),
    "float8 on an A100": (
        GPT2.replace("h100", "a100").replace("compute: bf16", "compute: bf16, float8: rowwise"),
        "compile: {}",
        "no 8-bit matrix units",
    ),
    "8-bit gathers with scales per row": (
        GPT2.replace("gpus_per_node: 1", "gpus_per_node: 2").replace("compute: bf16", "compute: bf16, float8: rowwise"),
        "compile: {}\nparallel: {fsdp: {degree: 2, float8_all_gather: true}}",
        "one scale each",
    ),
    "the loss of another code": (GPT2, "compile: {loss: true}", "for torchtitan"),
    "split backward": (
        GPT2.replace("gpus_per_node: 1", "gpus_per_node: 2").replace("transformers", "nanogpt"),
        "compile: {}\nparallel: {pipeline: {degree: 2, schedule: zb-h1}}",
        "splits backward",
    ),
    "chain": (
        "model: {chain: {layers: 2, entry: 1 MiB, activation: 2 MiB, forward: 1 ms, backward: 2 ms}}\n",
        "compile: {}",
        "chain",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "extra", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_modelled_compiled_is_refused(text: str, extra: str, message: str) -> None:
    with pytest.raises(ScenarioError) as error:
        load_text(f"{text}{extra}\n", "compile")
    assert any(message in problem.text for problem in error.value.problems)
