"""Sizes of buffers that kernels allocate for themselves and no dispatch trace shows. All in bytes.

Sources: the CUDA sources of torch 2.14 named at each function, checked against recordings (TAPE.md 4,
TAPE_LLAMA_FSDP.md 0 and 3) with 40 to 170 multiprocessors, compute capability 7.5 to 12.0, fp32 and bf16. Functions
that are fits say so. Not known and therefore zero: what cuDNN, cuBLASLt's heuristics and NCCL take on a real device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.runtime.tape import DeviceFacts


def round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _floor_power_of_two(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)


def reduce_buffers(device: DeviceFacts, reduced: int, outputs: int) -> tuple[int, ...]:
    """Partial results and semaphores of a sum of `reduced` rows into `outputs` columns (Reduce.cuh, setReduceConfig).

    Used only where at least 256 rows per thread remain and the grid leaves multiprocessors idle.
    """
    vector = 4
    while outputs % vector:
        vector //= 2
    columns, limit = outputs // vector, 512 // vector
    x = _floor_power_of_two(columns) if columns < limit else limit
    y = _floor_power_of_two(reduced) if reduced < limit else limit
    width = min(x, 32)
    height = min(y, limit // width)
    width = min(x, limit // height)
    threads = width * height
    values, step = reduced, width
    split_in_block = values >= height * 16 or values >= 256
    if split_in_block:
        values = ceil_div(values, height)
    else:
        step *= height
    grid = ceil_div(columns, step)
    target = device.sms * (device.threads_per_sm // threads)
    if not (split_in_block and values >= 256 and grid <= target):
        return ()
    blocks = max(min(ceil_div(target, grid), ceil_div(values, 16)), ceil_div(values, 256))
    return () if blocks <= 1 else (4 * outputs * blocks * width * vector, 4 * grid)


def norm_buffers(device: DeviceFacts, elements: int, item_bytes: int = 4) -> tuple[int, ...]:
    """Partial results and semaphore of linalg_vector_norm (in fp32) or max over everything (Reduce.cuh, 512 threads a
    block)."""
    values = ceil_div(elements, 512)
    if values < 256:
        return ()
    target = device.sms * (device.threads_per_sm // 512)
    return item_bytes * max(min(target, ceil_div(values, 16)), ceil_div(values, 256)), 4


def flash_splits(device: DeviceFacts, batch_heads: int, queries: int, keys: int, head_dim: int) -> int:
    """Number of key splits of a flash forward (flash_api.cpp, num_splits_heuristic)."""
    key_block = 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64
    key_blocks, tiles = ceil_div(keys, key_block), batch_heads * ceil_div(queries, 64)
    slots = device.sms * 2
    if tiles >= 0.8 * slots:
        return 1
    efficiency: dict[int, float] = {}
    for k in range(1, min(128, slots, key_blocks) + 1):
        if k == 1 or ceil_div(key_blocks, k) != ceil_div(key_blocks, k - 1):
            waves = tiles * k / slots
            efficiency[k] = waves / ceil_div(tiles * k, slots)
    best = max(efficiency.values())
    return next(k for k in sorted(efficiency) if efficiency[k] >= 0.85 * best)


def norm_gradient_parts(device: DeviceFacts, rows: int, width: int) -> int:
    """Partial rows of a normalization's weight gradient; 0 where one pass does it (layer_norm_kernel.cu)."""
    if rows <= 65536 or width // 32 >= device.sms // 2:
        return 0
    return min(ceil_div(rows, 32), 32768 // ceil_div(width, 32))


def efficient_backward_workspace(device: DeviceFacts, batch_heads: int, length: int, head_dim: int) -> int:
    """Memory-efficient attention backward in fp32 (kernel_backward.h, workspace_elements_gq).

    dq is collected in tiles of `rows` queries by 64 columns in fp32, each with 16 bytes of lock and counter. Up to head
    dimension 64 the kernel has 64 rows; above 128, but 64 where that kernel's shared memory does not fit.
    """
    rows, columns = 64 if head_dim <= 64 or not device.large_shared_memory else 128, 64
    tiles = ceil_div(length, rows) * ceil_div(head_dim, columns)
    return batch_heads * tiles * (rows * columns * 4 + 16)


def cub_radix_sort(n: int, vocab: int) -> int:
    """Temporary storage of cub's onesweep sort of n int64 keys below `vocab` with int64 values."""
    passes = ceil_div(vocab.bit_length(), 8)
    second_buffers = 2 * round_up(8 * n, 256) if passes > 1 else 0
    return second_buffers + 511 + 2048 * passes + 1024 * ceil_div(n, 4608)


def cub_scan(n: int, item_bytes: int = 8) -> int:
    """Temporary storage of cub's scan of int64 (a fit to 8 sizes), or of int32 (to 5 sizes up to 256)."""
    return round_up(2 * item_bytes * (32 + ceil_div(n, 896)), 256) + 511


def cub_unique(n: int) -> int:
    """Temporary storage of cub's unique-by-key (a fit to 3 sizes)."""
    return round_up(16 * (32 + ceil_div(n, 4608)), 256) + 511


def split_copy_table(device: DeviceFacts, chunk_bytes: list[int], ranks: int) -> int:
    """Pointer table of split_with_sizes_copy, FSDP2's copy-out (TensorShape.cu): blocks of 128 threads x 16 bytes."""
    blocks = sum(ceil_div(size, 2048) for size in chunk_bytes) * ranks
    iterations = ceil_div(blocks, device.sms * device.threads_per_sm // 128 * 2)
    root = next(k for k in range(1, iterations + 1) if k * k >= iterations)
    repeats = ceil_div(iterations, min(ranks, root))
    return 8 * (4 * len(chunk_bytes) + 1 + sum(ceil_div(size, 2048 * repeats) for size in chunk_bytes))


def chunk_cat_table(chunk_bytes: list[int]) -> int:
    """Pointer table of chunk_cat, FSDP2's copy-in before a reduce-scatter (TensorShape.cu)."""
    return 8 * (6 * len(chunk_bytes) + 2 + sum(ceil_div(size, 2048) for size in chunk_bytes))
