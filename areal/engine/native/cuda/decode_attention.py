"""Attention of decode rows: one new token per row over the whole cached sequence of its slot.

Memory-bound: a row of L tokens moves 4 * L * K * H bytes in bf16 (512 rows of 768 tokens, K = 2,
H = 128: 403 MB, 94 us at 4.3 TB/s). A program takes one (row, key/value head) and computes its G
query heads together, padded to the 16 rows of a tensor-core product, so every key is read once. A
tile is 32 KiB of keys and values, 64 tokens with H = 128; a program buffers two, and three programs
fit into a multiprocessor of Hopper: at least 96 KiB in flight, several times the 25 KiB that hide
memory latency. Of the short tiles of wide heads it buffers three, and two programs fit: with H =
256, 256 rows of 512 tokens are read at 88 % of the speed of a copy, with tiles of 64 at 78 %.

Long rows are cut into splits, so that few rows fill the device and one long row does not delay the
others: each split writes its result and the logarithm of its weight to the workspace, and the last
program of a (row, head) folds them in split order: one launch, and the same bits at every replay.
With one split a row's result depends on the row alone. For rows that share a prompt, the first
split starts from the result of `prompt_attention`. With a sliding window a row starts at the first
token it sees; rows that share a prompt see different parts of it then, so they read it alone.

Shapes: R rows, S slots, P pages per slot, N query heads, K key/value heads, G = N / K, H head dim.
"""

# Launch options (num_warps, num_stages) are none of a kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from areal.engine.native.cuda.attention_tiles import attend_tiles, padded, scale_log2e
from areal.engine.native.cuda.device import OVERLAP, Device, await_previous, device_of, overlapping
from areal.engine.native.cuda.fp8_tensors import CacheScales
from areal.engine.native.cuda.prompt_attention import fold_prompt, prompt_span
from areal.engine.native.cuda.shared_prompts import PROMPT_TILE, SharedPrompts

MAX_SPLITS = 64
_MAX_GRID_ROWS = 65535  # of the second dimension of a CUDA grid
_TILE_BYTES = 32 * 1024  # of keys and values
_FIXED_BYTES = 8 * 1024  # of shared memory, besides queries and tiles
_SHORT_TILE = 32  # tokens: up to here one more tile is buffered, and none is halved
_MIN_TILE = 16  # tokens that a tensor-core product sums over
# Programs per multiprocessor from which on it pays that three run at once on an FP8 cache, with
# some registers spilled, where two fit. On an H200: 189 us in place of 214 with 31 programs, 68 in
# place of 69 with 8; but 19.9 in place of 16.2 with 2, which run at once anyway.
_CROWD = 6
_CROWD_REGISTERS = 168
_FOLDED = 16384  # float32 of splits that a program folds at once: 128 per thread
# Tokens of a split that take as long as folding once more: only longer ones are cut into more
# splits than are folded at once.
LONG_SPLIT = 512


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """Tiling of a decode launch; a split has at least `min_split` tokens."""

    tile: int
    min_split: int
    num_warps: int
    num_stages: int


def tiles_for(num_splits: int, head_dim: int, dtype: torch.dtype, device: Device) -> DecodeTiles:
    """By the bytes of a token; one shape for every batch with one split.

    Many splits mean one or two rows, often short: small tiles give them to more multiprocessors.
    """
    row_bytes = padded(head_dim, fp8=dtype.itemsize == 1) * dtype.itemsize
    tile = max(_MIN_TILE, min(128, _TILE_BYTES // (2 * row_bytes)))
    while tile > _MIN_TILE and 4 * tile * row_bytes > 0.7 * device.program_bytes:
        tile //= 2
    min_split, most_buffers = 128 if num_splits <= 4 else 64, 2 if tile > _SHORT_TILE else 3
    if num_splits > 16:
        tile = min_split = tile // 2 if tile > _SHORT_TILE else tile
        most_buffers = 3
    buffers = device.stages(_FIXED_BYTES + 16 * row_bytes, 2 * tile * row_bytes, most_buffers)
    return DecodeTiles(tile, min_split, num_warps=4, num_stages=buffers + 1)


def splits_for(num_rows: int, num_kv_heads: int, device: Device) -> int:
    """Splits (a power of two) for a batch: about one program per multiprocessor, or, in up to 4
    splits, two.

    Measured on an H200: more splits cost more in workspace traffic than they gain; but rows of
    unequal length need a few, so that the longest does not run alone at the end. A full batch has
    enough programs. When only long rows are left, the batch is small again.
    """
    per_pair = device.num_processors / (num_rows * num_kv_heads)
    one, two = (2 ** round(math.log2(share * per_pair)) for share in (4 / 3, 2))
    return min(MAX_SPLITS, max(1, one, min(two, 4)))


@dataclass(frozen=True, slots=True)
class Workspace:
    """Partial results of splits. One workspace serves all launches of a stream, in order."""

    result: torch.Tensor  # [X, H] float32, X: (row, key/value head, split, query head of the group)
    log_weight: torch.Tensor  # [X] float32, in base 2
    arrived: torch.Tensor  # [R * K] int32, 0 between launches

    @classmethod
    def make(
        cls,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        num_splits: int | None = None,
    ) -> Workspace:
        """For up to `max_rows` rows in `num_splits` splits; None: as `splits_for` chooses."""
        properties = device_of(device)
        pairs = max(
            rows * (num_splits or splits_for(rows, num_kv_heads, properties))
            for rows in range(1, max_rows + 1)
        )
        result = torch.empty(pairs * num_heads, head_dim, dtype=torch.float32, device=device)
        arrived = torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device)
        return cls(result, result.new_empty(len(result)), arrived)


def decode_attention(
    q_RNH: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table_SP: torch.Tensor,
    slot_R: torch.Tensor,
    num_tokens_S: torch.Tensor,
    out_RNH: torch.Tensor,
    partial: Workspace | None,
    num_splits: int,
    shared: SharedPrompts | None = None,
    tiles: DecodeTiles | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
    scales: CacheScales | None = None,
) -> None:
    """Row r attends to positions 0..num_tokens[slot[r]]-1, or to the last `window` of them; one
    split needs no workspace.

    `shared`: `prompt_attention` has filled its space for these rows. `tiles` overrides `tiles_for`
    in benchmarks. `scale` of the scores; None: H ** -0.5.
    `scales` of a cache in FP8.
    """
    assert shared is None or window is None, "rows with a window read their prompts alone"
    tiles = tiles or tiles_for(num_splits, q_RNH.shape[2], keys.dtype, device_of(q_RNH.device))
    _launch(
        q_RNH, keys, values, page_table_SP, slot_R, num_tokens_S, 0, out_RNH, partial, num_splits,
        shared, tiles, window, scale, scales,
    )  # fmt: skip


def rows_attention(
    q_TNH: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages_CP: torch.Tensor,
    chunk_T: torch.Tensor,
    position_T: torch.Tensor,
    out_TNH: torch.Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    scales: CacheScales | None = None,
    ahead_T: torch.Tensor | None = None,
) -> None:
    """Prefill rows by the decode kernel: row t sees 0..position[t] of pages[chunk[t]], or the last
    `window` of these. `ahead_T` int32: how many of them are ahead of the row, and not counted by
    `window`.

    A row's bits are those of `decode_attention` with one split; the cost is that every row reads
    all its keys.
    """
    tiles = tiles_for(1, q_TNH.shape[2], q_TNH.dtype, device_of(q_TNH.device))
    for start in range(0, len(q_TNH), _MAX_GRID_ROWS):
        rows = slice(start, start + _MAX_GRID_ROWS)
        ahead = None if ahead_T is None else ahead_T[rows]
        _launch(
            q_TNH[rows], keys, values, pages_CP, chunk_T[rows], position_T[rows], 1, out_TNH[rows],
            None, 1, None, tiles, window, scale, scales, ahead,
        )  # fmt: skip


def _launch(
    q_RNH: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table_SP: torch.Tensor,
    slot_R: torch.Tensor,
    lengths: torch.Tensor,
    length_by_row: int,
    out_RNH: torch.Tensor,
    partial: Workspace | None,
    num_splits: int,
    shared: SharedPrompts | None,
    tiles: DecodeTiles,
    window: int | None,
    scale: float | None,
    scales: CacheScales | None = None,
    ahead: torch.Tensor | None = None,
) -> None:
    num_rows, num_heads, head_dim = q_RNH.shape
    num_kv_heads, page_size = keys.shape[1:3]
    heads = triton.next_power_of_2(num_heads // num_kv_heads)
    if num_splits == 1:
        partial = None
    width = padded(head_dim, fp8=scales is not None)
    num_programs = num_rows * num_kv_heads * num_splits
    is_crowded = num_programs >= _CROWD * device_of(q_RNH.device).num_processors
    _decode_kernel[(num_kv_heads, num_rows, num_splits)](
        q_RNH, keys, values, scales and scales.keys, scales and scales.values, page_table_SP,
        slot_R, lengths, length_by_row, ahead, out_RNH,
        partial and partial.result, partial and partial.log_weight, partial and partial.arrived,
        shared and shared.shared_R, shared and shared.counts, shared and shared.space.acc,
        shared and shared.space.score_max, shared and shared.space.weight_sum,
        q_RNH.stride(0), out_RNH.stride(0), page_table_SP.stride(0), keys.stride(0),
        scale_log2e(scale, head_dim), tiles.min_split, window or 0,
        GROUP=num_heads // num_kv_heads,
        HEADS=heads,
        CHUNK=min(num_splits, max(1, _FOLDED // (heads * width))),
        GROUP_PADDED=max(16, heads),
        HEAD_DIM=head_dim,
        PADDED=width,
        PAGE_SIZE=page_size,
        NUM_SPLITS=num_splits,
        TILE=tiles.tile,
        LONG_SPLIT=LONG_SPLIT,
        PROMPT_TILE=PROMPT_TILE,
        SHARED=shared is not None,
        WINDOWED=window is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        maxnreg=_CROWD_REGISTERS if scales and is_crowded and width <= 128 else None,
        **overlapping(OVERLAP),
    )  # fmt: skip


# Not specialized, so that decode rows and prefill rows run one binary, for equal bits.
@triton.jit(
    do_not_specialize=["length_by_row", "table_stride", "window"],
    do_not_specialize_on_alignment=[
        *["page_table", "slots", "lengths", "ahead", "shared_tokens", "counts"],
    ],
)
def _decode_kernel(
    q, keys, values, key_scales, value_scales, page_table, slots, lengths,
    length_by_row,  # 0: number of tokens by slot; 1: position by row
    ahead,  # by row: tokens that it sees beyond its own; None: 0
    out, partial_result, partial_weight, arrived, shared_tokens, counts, prompt_acc, prompt_max,
    prompt_sum, q_stride, out_stride, table_stride, page_stride, scale_log2e, min_split, window,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,  # GROUP, up to a power of two
    CHUNK: tl.constexpr,  # splits that are folded at once
    GROUP_PADDED: tl.constexpr,  # to the rows of a tensor-core product
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, PAGE_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr, TILE: tl.constexpr, LONG_SPLIT: tl.constexpr,
    PROMPT_TILE: tl.constexpr, SHARED: tl.constexpr, WINDOWED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    kv_head, split = tl.program_id(0), tl.program_id(2)
    row = tl.program_id(1).to(tl.int64)
    # No kernel of a forward writes these: they are read before the previous kernel has ended.
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(lengths + tl.where(length_by_row != 0, row, slot)) + length_by_row
    begin, end = 0, length
    if WINDOWED:
        reach = window if ahead is None else window + tl.load(ahead + row)
        begin = tl.maximum(length - reach, 0)
    if SHARED:
        shared = tl.load(shared_tokens + row)
        begin = shared
    await_previous(OVERLAP)
    used = 1
    if NUM_SPLITS > 1:
        used, span = cut_row(length - begin, min_split, NUM_SPLITS, CHUNK, TILE, LONG_SPLIT)  # pyright: ignore[reportGeneralTypeIssues]  # inlined
        if split >= used:
            return
        begin += split * span
        end = tl.minimum(begin + span, length)

    head_M = tl.arange(0, GROUP_PADDED)
    dim_H = tl.arange(0, PADDED)
    real_MH = (head_M < GROUP)[:, None] & (dim_H < HEAD_DIM)[None, :]
    element_MH = (kv_head * GROUP + head_M)[:, None] * HEAD_DIM + dim_H[None, :]
    q_MH = tl.load(q + row * q_stride + element_MH, mask=real_MH, other=0.0)
    max_M = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    sum_M = tl.zeros([GROUP_PADDED], tl.float32)
    acc_MH = tl.zeros([GROUP_PADDED, PADDED], tl.float32)
    if SHARED:
        parts = tl.load(counts + 1)
        num_parts = tl.cdiv(shared, tl.maximum(prompt_span(shared, parts, PROMPT_TILE), 1))
        max_M, sum_M, acc_MH = fold_prompt(
            max_M, sum_M, acc_MH, prompt_acc, prompt_max, prompt_sum,
            (row * tl.num_programs(0) + kv_head) * parts * GROUP,
            tl.where(split == 0, num_parts, 0),
            GROUP, HEAD_DIM,
        )  # fmt: skip
    max_M, sum_M, acc_MH = attend_tiles(
        q_MH,
        tl.full([GROUP_PADDED], 0, tl.int32) + (end - 1),
        max_M, sum_M, acc_MH,
        keys + kv_head * PAGE_SIZE * HEAD_DIM,
        values + kv_head * PAGE_SIZE * HEAD_DIM,
        None if key_scales is None else key_scales + kv_head * PAGE_SIZE,
        None if key_scales is None else value_scales + kv_head * PAGE_SIZE,
        page_table + slot * table_stride,
        begin, end, end - 1, page_stride, scale_log2e, window, HEAD_DIM, PAGE_SIZE, TILE,
        MASKED=True,
        WINDOWED=False,  # all of a row's keys from `begin` on are in its window
    )  # fmt: skip
    out += row * out_stride
    if used == 1:
        result_MH = acc_MH / sum_M[:, None]
        tl.store(out + element_MH, result_MH.to(out.dtype.element_ty), mask=real_MH)
    elif NUM_SPLITS > 1:
        end_split(
            max_M, sum_M, acc_MH, out + kv_head * GROUP * HEAD_DIM, partial_result, partial_weight,
            arrived, row * tl.num_programs(0) + kv_head, split, used, GROUP,
            GROUP, HEAD_DIM, PADDED, NUM_SPLITS, HEADS, CHUNK,
        )  # fmt: skip


@triton.jit
def cut_row(
    num_tokens, min_split,
    NUM_SPLITS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, LONG_SPLIT: tl.constexpr,
):  # fmt: skip
    """(splits of a row, tokens of each but the last)"""
    most = tl.minimum(NUM_SPLITS, tl.maximum(CHUNK, tl.cdiv(num_tokens, LONG_SPLIT)))
    used = tl.minimum(most, tl.cdiv(num_tokens, min_split))
    span = tl.cdiv(tl.cdiv(num_tokens, used), TILE) * TILE
    return tl.cdiv(num_tokens, span), span


@triton.jit
def end_split(
    max_M, sum_M, acc_MH, out, partial_result, partial_weight, arrived, pair, split, used,
    num_heads,  # of this program, of the GROUP that the workspace has room for
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, NUM_SPLITS: tl.constexpr,
    HEADS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Leave the result of a split; the last one of a (row, key/value head) folds them all."""
    head_M, dim_H = tl.arange(0, max_M.shape[0]), tl.arange(0, PADDED)
    real_MH = (head_M < num_heads)[:, None] & (dim_H < HEAD_DIM)[None, :]
    entry_M = (pair * NUM_SPLITS + split) * GROUP + head_M
    tl.store(partial_weight + entry_M, max_M + tl.log2(sum_M), mask=head_M < num_heads)
    result_ptr = partial_result + entry_M[:, None] * HEAD_DIM + dim_H[None, :]
    tl.store(result_ptr, acc_MH / sum_M[:, None], mask=real_MH)
    # Orders the stores of all threads before one thread's release of the counter.
    tl.debug_barrier()
    if tl.atomic_add(arrived + pair, 1, sem="acq_rel") == used - 1:
        tl.store(arrived + pair, 0)
        first = pair * NUM_SPLITS * GROUP
        _combine(
            out, partial_result + first * HEAD_DIM, partial_weight + first,
            used, num_heads, GROUP, HEAD_DIM, PADDED, HEADS, CHUNK,
        )  # fmt: skip


@triton.jit
def _combine(
    out,
    partial_result,
    partial_weight,
    used,
    num_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Fold the `used` splits of one (row, key/value head), all query heads at once.

    Latency is all: the results of a chunk of splits are one load, on their way while the weights
    are computed.
    """
    index_S, head_M = tl.arange(0, CHUNK), tl.arange(0, HEADS)
    dim_H = tl.arange(0, PADDED)
    real_MH = (head_M < num_heads)[:, None] & (dim_H < HEAD_DIM)[None, :]
    place_MH = head_M[:, None] * HEAD_DIM + dim_H[None, :]
    best_M = tl.full([HEADS], float("-inf"), tl.float32)
    total_M = tl.zeros([HEADS], tl.float32)
    sum_MH = tl.zeros([HEADS, PADDED], tl.float32)
    for begin in range(0, used, CHUNK):
        there_S = begin + index_S < used
        entry_S = (begin + index_S) * GROUP
        # ".cg" reads from the L2 cache, which has the other programs' stores.
        result_SMH = tl.load(
            partial_result + (entry_S * HEAD_DIM)[:, None, None] + place_MH[None],
            there_S[:, None, None] & real_MH[None],
            0.0,
            cache_modifier=".cg",
        )
        log_SM = tl.load(
            partial_weight + entry_S[:, None] + head_M[None, :],
            there_S[:, None] & (head_M < num_heads)[None, :],
            float("-inf"),
            cache_modifier=".cg",
        )
        new_best_M = tl.maximum(best_M, tl.max(log_SM, 0))
        shift_M = tl.where(head_M < num_heads, new_best_M, 0.0)  # -inf - -inf would be NaN
        weight_SM = tl.exp2(log_SM - shift_M[None, :])
        shrink_M = tl.exp2(best_M - shift_M)
        total_M = total_M * shrink_M + tl.sum(weight_SM, 0)
        sum_MH = sum_MH * shrink_M[:, None] + tl.sum(result_SMH * weight_SM[:, :, None], 0)
        best_M = new_best_M
    result_MH = (sum_MH / total_M[:, None]).to(out.dtype.element_ty)
    tl.store(out + place_MH, result_MH, real_MH)
