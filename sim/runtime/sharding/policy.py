"""What a fully_shard unit is told, as data: no branch hangs on the name of a layout."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPolicy:
    """One unit's settings.

    shard_ranks: size W of the group that shards; replicas: ranks that hold equal shards (HSDP).
    reshard_after_forward: False = stays gathered, True = freed, k = kept as a shard over k ranks.
    original / param / reduce: dtypes of the sharded parameters, of gathered ones (None: original), of reduction (None:
    the gradient's own). matrix_dtype: dtype in which parameters of two dimensions are gathered, None: as the others
    (torchao's float8 all-gather). cast_inputs: dtype for floating inputs of the module, None = as they come.
    """

    shard_ranks: int
    replicas: int = 1
    reshard_after_forward: bool | int = True
    reshard_after_backward: bool = True
    original_dtype: str = "fp32"
    param_dtype: str | None = "bf16"
    matrix_dtype: str | None = None
    reduce_dtype: str | None = "fp32"
    cast_inputs: str | None = "bf16"
    cpu_offload: bool = False
    reduce_scatter_buffers: int = 1

    @property
    def casts(self) -> bool:
        """Are parameters cast before they are gathered?"""
        return self.param_dtype is not None and self.param_dtype != self.original_dtype

    @property
    def gathered_dtype(self) -> str:
        return self.param_dtype or self.original_dtype

    def gathered_dtype_of(self, shape: tuple[int, ...]) -> str:
        """Of a parameter of that shape. Matrices of other sizes than multiples of 16 stay as they are."""
        matrix = len(shape) == 2 and not any(size % 16 for size in shape)
        return self.matrix_dtype if self.matrix_dtype is not None and matrix else self.gathered_dtype
