"""Layers of the models of Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models").

s tokens, b sequences, h hidden, a heads, L layers, t tensor-parallel ranks, p pipeline stages, v chunks per stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.program.program import Mem, Owner, Program
from sim.runtime.record import record
from sim.scenario import load_text
from sim.scenario.setup import Setup

STRATEGIES = {
    "none": "{}",
    "sp": "{parallel: {tensor: {sequence_parallel: true}}}",
    "selective": "{checkpoint: {inside: core_attention, reentrant: true}}",
    "selective-sp": "{checkpoint: {inside: core_attention, reentrant: true}, parallel: {tensor: {sequence_parallel: true}}}",
    "full": "{checkpoint: {every: 1, reentrant: true}}",
    "full-sp": "{checkpoint: {every: 1, reentrant: true}, parallel: {tensor: {sequence_parallel: true}}}",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One model of the paper's table 3 and how it is split; s = 2048, t = 8."""

    preset: str
    h: int
    a: int
    layers: int
    b: int
    p: int
    v: int
    s: int = 2048
    t: int = 8

    @property
    def interleaving(self) -> float:
        """Activations of the first stage over those of L layers: 1, interleaved 1 + (p - 1) / (p v)."""
        return 1 + (self.p - 1) / (self.p * self.v) if self.v > 1 else 1.0


CASES = (
    Case("gpt-22b", 6144, 64, 48, 4, 1, 1),
    Case("gpt-175b", 12288, 96, 96, 1, 8, 3),
    Case("gpt-530b", 20480, 128, 105, 1, 35, 3),
    Case("gpt-1t", 25600, 160, 128, 1, 64, 1),
)


def setup_of(case: Case, strategy: str, layers: int, more: str = "optimizer: null") -> Setup:
    """`layers` of a model on the paper's machine, without pipeline."""
    text = (
        f"model: {{preset: {case.preset}, implementation: megatron, layers: {layers}}}\n"
        f"cluster: {{gpu: a100-sxm-80gb, gpus_per_node: 8}}\nbatch: {{micro_batch: {case.b}, seq_len: {case.s}}}\n"
        f"parallel: {{tensor: {{degree: {case.t}}}}}\n"
        f"precision: {{parameters: fp16, compute: fp16, reduce: fp32}}\n{more}\n"
        f"strategies: {{{strategy}: {STRATEGIES[strategy]}}}\n"
    )
    return load_text(text, "korthikanti").strategies[0]


def alive_bytes(program: Program, mark: str, owners: tuple[Owner, ...]) -> int:
    """Requested bytes of some owners that are alive at a mark."""
    stop = next(m.memory_events for m in program.marks if m.name == mark)
    kinds, handles = program.mem_kind[:stop], program.mem_handle[:stop]
    sizes = program.mem_bytes[program.mem_kind == Mem.ALLOC]
    alive = set(handles[kinds == Mem.ALLOC].tolist()) - set(handles[kinds == Mem.FREE].tolist())
    return sum(int(sizes[h]) for h in alive if program.owners[h] in owners)


def bytes_per_layer(
    case: Case, strategy: str, mark: str, owners: tuple[Owner, ...], more: str = "optimizer: null"
) -> int:
    """What one layer more adds."""
    three, four = (record(setup_of(case, strategy, layers, more), steps=1) for layers in (3, 4))
    return alive_bytes(four, mark, owners) - alive_bytes(three, mark, owners)


def saved_per_layer(case: Case, strategy: str) -> int:
    """Activations of a layer on one rank that wait for backward, checkpoints included."""
    return bytes_per_layer(case, strategy, "s0.fwd0", (Owner.ACTIVATION, Owner.CHECKPOINT))
