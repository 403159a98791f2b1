"""Causal attention of prompt chunks over their pages: our kernel, and FlashInfer's if installed.

Compute-bound: a chunk of L rows from position 0 costs 2 * N * H * L^2 operations (32 prompts of
2048, N = 12, H = 128: 412 GFLOP, 0.9 ms at 450 TFLOP/s). The G query heads of a key/value head are
packed with consecutive rows into one tile of 128, the rows that two warpgroups multiply: a tile
spans only 128 / G tokens, so few keys above the diagonal are read, short chunks fill it, and a tile
of keys serves G heads. Keys come 64 at a time: scores and sums stay in registers. With a sliding
window a tile starts at the first key that its first row sees.

FlashInfer is optional: it is tried once, when the engine starts. Its first start on a machine
compiles its kernel, which takes minutes. On an H200 (benchmark/attention_kernels.py) a prefill of
32 prompts of 2048 tokens takes 1.0 ms per layer instead of 1.2, one of 32768 tokens 6.2 instead of
7.9. Decoding uses our kernel, which overlaps with its neighbours: with FlashInfer's, steps of 1 and
of 64 rows were 2 to 18 % longer. It serves the layers without a window: those with one read few
keys.

Shapes: T rows of all chunks, C chunks, P pages of a chunk, N query heads, K key/value heads,
G = N / K, H head dim; M = (row, query head of the group) pairs of a tile.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from areal.engine.native.cuda.attention_tiles import MAX_SUMS, attend_tiles, padded, scale_log2e
from areal.engine.native.cuda.device import Device, device_of
from areal.engine.native.cuda.fp8_tensors import CacheScales
from areal.utils import logging

# Launch options (num_warps, num_stages) are none of a kernel's own parameters.
# pyright: reportCallIssue=false


_SHORT_CONTEXT = 1024  # tokens
_NARROW = 128  # columns of a tile of heads
_TILE = 32 * _NARROW  # numbers of a small tile of keys


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    pairs: int  # (row, query head of the group) pairs of a program; a power of two
    keys: int
    num_warps: int
    num_stages: int


def tiles_for(
    max_rows: int,
    context: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    device: Device,
    *,
    fp8: bool = False,
) -> PrefillTiles:
    """Small tiles for chunks of few rows, and for float32, which has no tensor-core product; fewer
    pairs, keys and stages where heads are wide or shared memory is small.

    Measured on an H200: up to 1024 tokens of `context`, where much of the work is on the diagonal,
    small tiles are up to 1.5 times as fast, unless heads are wide; with 4096 they lose 4 to 17 %.
    On an FP8 cache, 64 pairs and 128 keys were 1.1 to 1.9 times as fast as 128 pairs and 64 keys.
    """
    width, keys, most_stages = padded(head_dim, fp8=fp8), 64, 3
    fewest = max(16, int(triton.next_power_of_2(group)))
    if max_rows * group <= 16 or dtype == torch.float32:
        pairs, num_warps = fewest, 4
    elif fp8:
        pairs, num_warps, keys, most_stages = max(64, fewest), 4, min(128, 4 * _TILE // width), 2
    elif max_rows * group <= 64:
        pairs, num_warps = 64, 4
    elif context <= _SHORT_CONTEXT and width <= _NARROW:
        pairs, num_warps, keys = max(64, fewest), 4, min(64, _TILE // width)
    else:
        pairs, num_warps = 128, 8
    while pairs * width > MAX_SUMS and pairs // 2 >= max(16, group):
        pairs //= 2
    row_bytes = width * dtype.itemsize
    while keys > 16 and device.stages(pairs * row_bytes, 2 * keys * row_bytes, 2) < 2:
        keys //= 2
    stages = device.stages(pairs * row_bytes, 2 * keys * row_bytes, most_stages)
    return PrefillTiles(pairs, keys, num_warps, stages)


def prefill_attention(
    q_TNH: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages_CP: torch.Tensor,
    first_row_C1: torch.Tensor,
    first_position_C: torch.Tensor,
    out_TNH: torch.Tensor,
    max_rows: int,
    tiles: PrefillTiles | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
    scales: CacheScales | None = None,
) -> None:
    """Chunk c owns rows first_row[c]..first_row[c+1]-1, at most `max_rows`, at the positions from
    first_position[c] on; a row attends to its page table's positions up to its own, or to the last
    `window` of these.

    `tiles` overrides `tiles_for` in benchmarks. `scale` of the scores; None: H ** -0.5.
    `scales` of a cache in FP8.
    """
    _, num_heads, head_dim = q_TNH.shape
    num_kv_heads, page_size = keys.shape[1:3]
    group = num_heads // num_kv_heads
    tiles = tiles or tiles_for(
        max_rows,
        pages_CP.shape[1] * page_size,
        group,
        head_dim,
        q_TNH.dtype,
        device_of(q_TNH.device),
        fp8=scales is not None,
    )
    num_chunks = first_position_C.shape[0]
    _prefill_kernel[(triton.cdiv(max_rows, tiles.pairs // group), num_kv_heads, num_chunks)](
        q_TNH,
        keys,
        values,
        scales and scales.keys,
        scales and scales.values,
        pages_CP,
        first_row_C1,
        first_position_C,
        out_TNH,
        q_TNH.stride(0),
        out_TNH.stride(0),
        pages_CP.stride(0),
        keys.stride(0),
        scale_log2e(scale, head_dim),
        window or 0,
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED=padded(head_dim, fp8=scales is not None),
        PAGE_SIZE=page_size,
        PAIRS=tiles.pairs,
        TILE=tiles.keys,
        WINDOWED=window is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


# The page table's width varies by batch and must not trigger recompilation.
@triton.jit(
    do_not_specialize=["table_stride", "window"],
    do_not_specialize_on_alignment=["page_table", "first_rows", "first_positions"],
)
def _prefill_kernel(
    q, keys, values, key_scales, value_scales, page_table, first_rows, first_positions, out,
    q_stride, out_stride, table_stride, page_stride, scale_log2e, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAIRS: tl.constexpr, TILE: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    # The last rows of a chunk have the most keys, so they start first for balance.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    chunk = tl.program_id(2).to(tl.int64)
    TILE_ROWS: tl.constexpr = PAIRS // GROUP
    first_row = tl.load(first_rows + chunk)
    num_rows = tl.load(first_rows + chunk + 1) - first_row
    begin = tile * TILE_ROWS
    if begin >= num_rows:
        return

    pair_M = tl.arange(0, PAIRS)
    dim_H = tl.arange(0, PADDED)
    row_M = begin + pair_M // GROUP
    real_M = (pair_M < TILE_ROWS * GROUP) & (row_M < num_rows)
    real_MH = real_M[:, None] & (dim_H < HEAD_DIM)[None, :]
    head_M = kv_head * GROUP + pair_M % GROUP
    element_MH = head_M[:, None] * HEAD_DIM + dim_H[None, :]
    row_M1 = (first_row + row_M).to(tl.int64)[:, None]
    q_MH = tl.load(q + row_M1 * q_stride + element_MH, mask=real_MH, other=0.0)

    first_position = tl.load(first_positions + chunk)
    end = first_position + tl.minimum(begin + TILE_ROWS, num_rows)
    first = 0
    if WINDOWED:
        first = tl.maximum(first_position + begin + 1 - window, 0) // TILE * TILE
    # Up to here every row of the tile sees every key, or those in its window.
    diagonal = (first_position + begin + 1) // TILE * TILE
    position_M = first_position + row_M
    keys += kv_head * PAGE_SIZE * HEAD_DIM
    values += kv_head * PAGE_SIZE * HEAD_DIM
    if key_scales is not None:
        key_scales += kv_head * PAGE_SIZE
        value_scales += kv_head * PAGE_SIZE
    page_table += chunk * table_stride
    max_M = tl.full([PAIRS], float("-inf"), tl.float32)
    sum_M = tl.zeros([PAIRS], tl.float32)
    acc_MH = tl.zeros([PAIRS, PADDED], tl.float32)
    max_M, sum_M, acc_MH = attend_tiles(
        q_MH, position_M, max_M, sum_M, acc_MH, keys, values, key_scales, value_scales, page_table,
        first, diagonal, end - 1, page_stride, scale_log2e, window, HEAD_DIM, PAGE_SIZE, TILE,
        MASKED=WINDOWED, WINDOWED=WINDOWED,
    )  # fmt: skip
    max_M, sum_M, acc_MH = attend_tiles(
        q_MH, position_M, max_M, sum_M, acc_MH, keys, values, key_scales, value_scales, page_table,
        diagonal, end, end - 1, page_stride, scale_log2e, window, HEAD_DIM, PAGE_SIZE, TILE,
        MASKED=True, WINDOWED=WINDOWED,
    )  # fmt: skip
    result_MH = (acc_MH / sum_M[:, None]).to(out.dtype.element_ty)
    tl.store(out + row_M1 * out_stride + element_MH, result_MH, mask=real_MH)


logger = logging.getLogger("NativeEngine")

_WORKSPACE_BYTES = 128 * 2**20  # what FlashInfer recommends


class FlashInferPrefill:
    def __init__(self, keys: torch.Tensor, num_heads: int, scale: float | None) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        _, num_kv_heads, self._page_size, head_dim = keys.shape
        self._heads = (num_heads, num_kv_heads, head_dim, self._page_size)
        self._dtype, self._scale = keys.dtype, scale
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=keys.device)
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND")
        self._planned = torch.cuda.Event()

    def plan(
        self, num_rows_C: np.ndarray, first_position_C: np.ndarray, pages_CP: np.ndarray
    ) -> None:
        """Lays out the chunks for the `attend` calls that follow."""
        # The previous plan may still be copied from the memory that this one is written to.
        self._planned.synchronize()
        num_tokens_C = first_position_C + num_rows_C
        num_pages_C = -(-num_tokens_C // self._page_size)
        is_used_CP = np.arange(pages_CP.shape[1]) < num_pages_C[:, None]
        self._wrapper.plan(
            _bounds(num_rows_C),
            _bounds(num_pages_C),
            _pinned(pages_CP[is_used_CP]),
            _pinned((num_tokens_C - 1) % self._page_size + 1),
            *self._heads,
            causal=True,
            sm_scale=self._scale,
            q_data_type=self._dtype,
        )
        self._planned.record()

    def attend(
        self, q_TNH: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out_TNH: torch.Tensor
    ) -> None:
        self._wrapper.run(q_TNH, (keys, values), out=out_TNH)


def _bounds(counts: np.ndarray) -> torch.Tensor:
    return _pinned(np.concatenate([[0], np.cumsum(counts)]))


def _pinned(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32)).pin_memory()


def flashinfer_prefill(
    keys: torch.Tensor, num_heads: int, scale: float | None = None
) -> FlashInferPrefill | None:
    """For a cache like `keys` `[num_pages, K, page_size, H]`; None where FlashInfer cannot run.

    `scale` of the scores; None: H ** -0.5.
    """
    if not _may_run(keys):
        return None
    # Logged first, so that a start that times out ends with this line.
    logger.info("trying FlashInfer for prefill: its first time on a machine takes minutes")
    # On any failure (no compiler, another version of FlashInfer) our kernel is used.
    try:
        return _tried(keys, num_heads, scale)
    except (ImportError, RuntimeError, OSError, TypeError) as error:
        logger.warning("FlashInfer is installed but not used: %s", error)
        return None


def _may_run(keys: torch.Tensor) -> bool:
    return (
        keys.is_cuda
        and keys.dtype in (torch.bfloat16, torch.float16)
        and keys.shape[3] in (64, 128, 256)
        and importlib.util.find_spec("flashinfer") is not None
    )


def _tried(keys: torch.Tensor, num_heads: int, scale: float | None) -> FlashInferPrefill:
    """Prefills one token, which compiles the kernel."""
    prefill = FlashInferPrefill(keys, num_heads, scale)
    prefill.plan(np.ones(1, np.int64), np.zeros(1, np.int64), np.zeros((1, 1), np.int64))
    q_TNH = torch.zeros(1, num_heads, keys.shape[3], dtype=keys.dtype, device=keys.device)
    prefill.attend(q_TNH, keys, keys, torch.empty_like(q_TNH))
    torch.cuda.synchronize(keys.device)
    return prefill
