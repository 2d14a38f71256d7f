"""Transformer Engine's numbers of 8 and 4 bit: casts by recipe, and a rank's copies of weights.

delayed: the scale comes from amaxes of earlier steps, so one kernel casts; tensorwise (current scaling): an amax pass
comes first; mxfp8: a scale per 32 numbers, along rows and along columns, each a cast of its own in one kernel; blockwise
(DeepSeek-V3's): likewise per 128 numbers, in fp32, of weights per 128 x 128; nvfp4:
a scale per 16 numbers and one per tensor, so that a pass finds amaxes first, also of what the random Hadamard transform
makes of the columns, which a cast of its own repeats (weights: no transform, one cast).
Products on Hopper read both factors along the summed dimension, so that what is summed over tokens (and weights in
backward) is needed transposed too; from Blackwell on only mxfp8 needs a second form. Weights are cast in the first
micro-batch of a step, and kept in both forms. Source: Transformer Engine 1.9 and 2.x, pytorch/module/linear.py,
layernorm_linear.py, base.py, tensor/; megatron-core 0.16.1, transformer_block.py; read there, no recording.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from sim.model.calls import Shape
from sim.model.config import ModelConfig
from sim.model.module import Parameter
from sim.program.kernels import Collective, packed_bytes
from sim.program.program import COMPUTE
from sim.runtime.scratch import round_up
from sim.runtime.tensor import Tensor
from sim.scenario.setup import Setup

if TYPE_CHECKING:
    from sim.runtime.tape import Tape

NON_TRANSPOSED_FROM = 100
"""Compute capability from which 8-bit products read factors in either order (is_non_tn_fp8_gemm_supported)."""
BLOCKS = {"mxfp8": 32, "blockwise": 128, "nvfp4": 16}
"""Numbers that share a scale."""
AMAX = {"tensorwise": "amax_kernel", "nvfp4": "hadamard_transform_amax"}
NVFP4_CASTS = ("quantize_nvfp4", "hadamard_transform_cast_columnwise")
FORWARD_TENSORS, BACKWARD_TENSORS = 3, 2
"""Tensors of a linear layer with a scale: input, weight, output; the gradients of output and input."""


class Cast(NamedTuple):
    """A tensor in 8 bit with its scales, in one form."""

    data: Tensor
    scales: Tensor


class Copies(NamedTuple):
    """Of one weight: in 8 bit along its rows (None: it is stored so), and in the form that backward's product needs."""

    rows: Cast | None
    columns: Cast | None


def start_fp8(tape: Tape, setup: Setup, slots: list[Parameter]) -> None:
    """Give the tape the state that a model with 8-bit products needs, once its parameters (`slots`) are placed."""
    assert isinstance(setup.model, ModelConfig)
    if setup.model.fp8 is None:
        return
    data, recipe = setup.data, setup.model.fp8.recipe
    replicas = data.degree if data is not None else 1
    group, ranks = ("dp", replicas) if replicas > 1 else ("tp", setup.tensor.degree)
    transposes = recipe not in BLOCKS and tape.device.compute_capability < NON_TRANSPOSED_FROM
    tape.fp8 = Fp8(tape, recipe, transposes, group, ranks)
    matrices = [slot.tensor for slot in slots if slot.in_fp8]
    tape.fp8.place([m for m in matrices if isinstance(m, Tensor)], kept=data is not None)


@dataclass(slots=True)
class Fp8:
    """A rank's state. `transposes`: products need factors along the summed dimension. `group`, `ranks`: who agrees on the
    amaxes of delayed scaling."""

    tape: Tape
    recipe: str
    transposes: bool
    group: str
    ranks: int
    matrices: int = 0
    _weights: dict[int, Copies] = field(default_factory=dict)
    _statistics: list[Tensor] = field(default_factory=list)

    @property
    def two_forms(self) -> bool:
        """Are factors of products for gradients apart from those of forward's?"""
        return self.transposes or self.in_blocks

    @property
    def in_blocks(self) -> bool:
        """Blocks of numbers share scales, along rows or along columns: the two forms come of the 16-bit tensor alone."""
        return self.recipe in BLOCKS

    @property
    def dtype(self) -> str:
        """Of the products' factors."""
        return "fp4" if self.recipe == "nvfp4" else "fp8"

    def place(self, weights: list[Tensor], kept: bool) -> None:
        """Room for the copies of these weights (if `kept` for a step), and for the scales and amaxes of delayed scaling,
        of one step (Megatron's default). Transformer Engine makes both at a layer's first forward."""
        self.matrices += len(weights)
        for weight in weights:
            if self.recipe == "delayed":
                for count in (FORWARD_TENSORS, BACKWARD_TENSORS):
                    self._statistics += [self.tape.empty((count,), "fp32") for _ in range(2)]
            if kept:
                rows = None if weight.dtype == "fp8" else self.empty(weight.shape, square=True)
                columns = self.empty(weight.shape, along_rows=False, square=True) if self.two_forms else rows
                self._weights[id(weight.storage)] = Copies(rows, columns)

    # -- casts -------------------------------------------------------------------------------------------------
    def cast(
        self, x: Tensor, rows: bool, columns: bool, agree: tuple[str, int] | None = None, amax_known: bool = False
    ) -> tuple[Cast | None, Cast | None]:
        """x [..., k] in 8 bit along rows and along columns, as asked for. Without two forms the one serves both.

        Of tensorwise scaling and nvfp4: `agree`: (group, ranks) that share one scale; of the first: `amax_known`: a kernel
        before has found it.
        """
        recorder, forms = self.tape.recorder, 2 if self.recipe == "nvfp4" else 1
        if self.recipe in ("tensorwise", "nvfp4"):
            if not amax_known or self.recipe == "nvfp4":
                recorder.memory_bound(AMAX[self.recipe], "reduce", x.bytes)
            if agree is not None:
                recorder.collective(Collective("all_reduce", 4 * forms, *agree, "fp32"), COMPUTE)
        made = [
            self.empty(x.shape, along_rows) if wanted else None for wanted, along_rows in self._forms(rows, columns)
        ]
        written = [cast.data.bytes + cast.scales.bytes if cast is not None else 0 for cast in made]
        if self.recipe == "nvfp4":
            for name, size_bytes in zip(NVFP4_CASTS, written):
                if size_bytes:
                    recorder.memory_bound(name, "elementwise", x.bytes + size_bytes)
            return made[0], made[-1]
        recorder.memory_bound("cast_transpose" if all(made[1:]) else "cast", "elementwise", x.bytes + sum(written))
        return made[0], made[-1]

    def both_forms(self, x: Tensor) -> tuple[Cast, Cast]:
        """x [..., k] for a product over k, and for one over the rows."""
        rows, columns = self.cast(x, True, True)
        assert rows is not None and columns is not None
        return rows, columns

    def _forms(self, rows: bool, columns: bool) -> list[tuple[bool, bool]]:
        return [(rows, True), (columns, False)] if self.two_forms else [(rows or columns, True)]

    def empty(self, shape: Shape, along_rows: bool = True, square: bool = False) -> Cast:
        """Room for x [..., k]; one scale, or one per block, padded to tiles of 128 x 4. `square`: a weight's blocks."""
        tape, (m, k) = self.tape, (prod(shape[:-1]), shape[-1])
        if not self.in_blocks:
            return Cast(tape.empty(shape, "fp8"), tape.empty((1,), "fp32"))
        block = BLOCKS[self.recipe]
        if self.recipe == "blockwise":  # Float8BlockQuantizer.get_scale_shape
            blocks, lines = (-(-k // block), m) if along_rows else (-(-m // block), k)
            grid = (blocks, round_up(lines, 4)) if not square else (-(-lines // block), round_up(blocks, 4))
            return Cast(tape.empty(shape, "fp8"), tape.empty(grid, "fp32"))
        m, k = (m, -(-k // block)) if along_rows else (-(-m // block), k)
        tiles = (round_up(m, 128), round_up(k, 4)) if along_rows else (round_up(m, 4), round_up(k, 128))
        return Cast(tape.empty(shape, self.dtype), tape.empty(tiles, "uint8"))

    def nothing(self) -> Cast:
        """In place of a tensor that nobody reads."""
        return Cast(self.tape.empty((0,), "fp8"), self.tape.empty((0,), "fp32"))

    def transposed(self, rows: Tensor) -> Tensor:
        """The other form of numbers that came in one, where they are transposed."""
        return self.tape.pointwise("transpose", rows.shape, "fp8", None, rows.bytes, "copy")

    # -- weights -----------------------------------------------------------------------------------------------
    def refresh(self, *weights: Tensor) -> None:
        """In the first micro-batch of a step the copies of weights [out, in] are made anew; one that is stored in 8 bit
        has the transposed one alone."""
        if not self.tape.first_micro_batch or self.tape.engine_running:
            return
        recorder, forms = self.tape.recorder, 2 if self.two_forms else 1
        for weight in weights:
            copies = self._weights.get(id(weight.storage))
            if copies is not None and copies.rows is None and copies.columns is not None:
                recorder.memory_bound("transpose", "copy", 2 * weight.elements)
            elif copies is not None and copies.rows is not None:
                if self.recipe in ("tensorwise", "nvfp4"):
                    recorder.memory_bound("amax_kernel", "reduce", weight.bytes)
                moved = weight.bytes + packed_bytes(forms * weight.elements, self.dtype)
                recorder.memory_bound("cast_transpose" if forms > 1 else "cast", "elementwise", moved)

    def turned(self, weight: Tensor) -> Tensor | None:
        """A gathered weight as the product for its input's gradient reads it, where no copies are kept; else None."""
        return self.transposed(weight) if self.two_forms and id(weight.storage) not in self._weights else None

    # -- amaxes ------------------------------------------------------------------------------------------------
    def update_scales(self, backward: bool) -> None:
        """Delayed scaling, after all layers: amaxes joined, the largest of all ranks, new scales."""
        recorder = self.tape.recorder
        size_bytes = 4 * self.matrices * (BACKWARD_TENSORS if backward else FORWARD_TENSORS)
        recorder.memory_bound("aten::cat", "copy", 2 * size_bytes)
        if self.ranks > 1:
            recorder.collective(Collective("all_reduce", size_bytes, self.group, self.ranks, "fp32"), COMPUTE)
        recorder.memory_bound("amax_and_scale_update_after_reduction", "elementwise", 4 * size_bytes)
