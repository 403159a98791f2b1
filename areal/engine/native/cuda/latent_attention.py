"""Multi-head latent attention over a paged cache of latent vectors, for decoding and for prefill.

    place_latents(q_TNH, kv_TX, norm, cos_TR, sin_TR, write_T, latents, q_TNX)
    decode_latents(q_RNX, latents, page_table_SP, slot_R, num_tokens_S, out_RNL, ...)
    prefill_latents(q_TNX, latents, pages_CP, first_row_C1, first_position_C, out_TNL, ...)

The product that makes the keys of a head from a latent vector is applied to its query instead, and
the one that makes values to the result (mixers.py): so all heads share one key of X dims, of which
the first L are also the value. The cache has that vector alone: 1152 bytes per token and layer in
bf16 with DeepSeek-V2's L = 512 and X = 576, where keys and values of 16 heads would take 10 KiB. A
tile of it is loaded once, for the scores and for the sums.

The rows of a tensor-core product are (row, head) pairs: a program has up to 32 heads of a decode
row, or of consecutive rows of a chunk. A score costs X multiplications and its share of the sums L,
3.4 times as many as with keys and values by head: prefill pays for the small cache, decoding is
bound by reading it. Long decode rows are cut into splits as in decode_attention.py.

Checkpoints rotate dims 2 i and 2 i + 1. Scores do not depend on the order of dims: the cache and
the queries that are attended with have all first dims of the pairs, then all second ones.

Shapes: T or R rows, N heads, H head dim of queries, its last 2 R dims rotated (R pairs), L latent
dim, X = L + 2 R, S slots, C chunks, P pages of a slot or chunk; in the kernels M (row, head) pairs.
"""

# Launch options (num_warps, num_stages) are none of a kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from areal.engine.native.cuda.attention_tiles import load_heads, padded, scale_log2e, weigh
from areal.engine.native.cuda.block_kernels import Norm, load_norm, rounded
from areal.engine.native.cuda.decode_attention import LONG_SPLIT, Workspace, cut_row, end_split
from areal.engine.native.cuda.device import OVERLAP, Device, await_previous, device_of, overlapping

_MAX_HEADS = 32  # of a program: more sums would not fit into the registers of 8 warps
_MIN_ROWS = 16  # of a tensor-core product
_PREFILL_PAIRS = 64  # that one warpgroup multiplies
_KEYS = 32  # tokens of a tile: 36 KiB with X = 576 in bf16
_MIN_KEYS = 16  # that a tensor-core product sums over
_MIN_SPLIT = 64  # tokens
_FOLDED = 8192  # float32 of splits that a program folds at once
_FIXED_BYTES = 8 * 1024  # of shared memory, besides queries and tiles
_HEADS_PER_PROGRAM = 8  # of the kernel that rotates


@dataclass(frozen=True, slots=True)
class LatentTiles:
    pairs: int  # (row, head) pairs of a program; a power of two
    keys: int
    num_warps: int
    num_stages: int


def head_tiles(num_heads: int) -> tuple[int, int]:
    """How many programs share the heads of a row, and the most heads of one, a power of two."""
    heads = min(_MAX_HEADS, int(triton.next_power_of_2(num_heads)))
    return -(-num_heads // heads), heads


def latent_workspace(
    max_rows: int,
    num_heads: int,
    latent_dim: int,
    device: torch.device,
    num_splits: int | None = None,
) -> Workspace:
    """For decode launches of up to `max_rows` rows in `num_splits`; None: as `splits_for` says."""
    tiles, heads = head_tiles(num_heads)
    return Workspace.make(max_rows, tiles * heads, tiles, latent_dim, device, num_splits)


def tiles_for(
    pairs: int, latent_dim: int, cached_dim: int, dtype: torch.dtype, device: Device
) -> LatentTiles:
    """Tiles of keys as wide as fit twice beside the queries, up to three of them in flight."""
    width = padded(latent_dim) + padded(cached_dim - latent_dim)
    token_bytes, keys = width * dtype.itemsize, _KEYS
    fixed_bytes = _FIXED_BYTES + pairs * token_bytes
    while keys > _MIN_KEYS and device.stages(fixed_bytes, keys * token_bytes, 2) < 2:
        keys //= 2
    most = 2 if pairs <= _MAX_HEADS else 3
    stages = device.stages(fixed_bytes, keys * token_bytes, most)
    return LatentTiles(pairs, keys, 4 if pairs <= _MIN_ROWS else 8, stages + (most == 2))


def place_latents(
    q_TNH: torch.Tensor,
    kv_TX: torch.Tensor,
    norm: Norm,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    write_T: torch.Tensor,
    latents: torch.Tensor,
    q_TNX: torch.Tensor,
) -> None:
    """Norm the latent vectors, rotate the keys beside them and write both to the cache; rotate the
    last dims of the queries into those of `q_TNX`.

    `latents` is `[num_pages, page_size, X]`; row t goes to the flat position `write_T[t]`. Rows of
    `q_TNH` and `kv_TX` may be apart.
    """
    num_rows, num_heads, head_dim = q_TNH.shape
    latent_dim = len(norm.weight)
    assert norm.offset == 0.0, "the norms of latent vectors multiply by their weight"
    _place_kernel[(num_rows, 1 + triton.cdiv(num_heads, _HEADS_PER_PROGRAM))](
        q_TNH, kv_TX, norm.weight, cos_TR, sin_TR, write_T, latents, q_TNX,
        q_TNH.stride(0), kv_TX.stride(0), norm.eps,
        N=num_heads,
        H=head_dim,
        L=latent_dim,
        R=cos_TR.shape[1],
        HEADS=_HEADS_PER_PROGRAM,
        BLOCK_L=triton.next_power_of_2(latent_dim),
        BLOCK_R=triton.next_power_of_2(cos_TR.shape[1]),
        num_warps=4,
        **overlapping(OVERLAP),
    )  # fmt: skip


@triton.jit
def _place_kernel(
    q_ptr, kv_ptr, norm_ptr, cos_ptr, sin_ptr, write_ptr, latents_ptr, out_ptr,
    q_stride, kv_stride, eps,
    N: tl.constexpr, H: tl.constexpr, L: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program 0 of a row has what is cached, the others have the queries of some heads each."""
    X: tl.constexpr = L + 2 * R
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    dim = tl.arange(0, BLOCK_L)
    is_latent = (dim < L) & (part == 0)
    weight = load_norm(norm_ptr + dim, is_latent, 0.0)
    await_previous(OVERLAP)
    pair = tl.arange(0, BLOCK_R)[None, :]
    if part == 0:
        kv_ptr += row * kv_stride
        x = tl.load(kv_ptr + dim, is_latent, 0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x) / L + eps) * weight
        latents_ptr += tl.load(write_ptr + row).to(tl.int64) * X
        tl.store(latents_ptr + dim, x.to(latents_ptr.dtype.element_ty), is_latent)
        _rotate_pairs(
            kv_ptr + L + 2 * pair, latents_ptr + L + pair, cos_ptr, sin_ptr, row, pair,
            pair < R, R,
        )  # fmt: skip
    else:
        head = ((part - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        source = q_ptr + row * q_stride + head * H + (H - 2 * R) + 2 * pair
        target = out_ptr + (row * N + head) * X + L + pair
        _rotate_pairs(
            source, target, cos_ptr, sin_ptr, row, pair, (head < N) & (pair < R), R
        )  # fmt: skip


@triton.jit
def _rotate_pairs(source, target, cos_ptr, sin_ptr, row, pair, mask, R: tl.constexpr):
    """Neighbours at `source` become element i and i + R at `target`, rounded as `rotate` does."""
    dtype: tl.constexpr = target.dtype.element_ty
    first = tl.load(source, mask, 0.0).to(tl.float32)
    second = tl.load(source + 1, mask, 0.0).to(tl.float32)
    cos = tl.load(cos_ptr + row * R + pair, pair < R, 0.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * R + pair, pair < R, 0.0).to(tl.float32)
    turned_first = rounded(first * cos, dtype) - rounded(second * sin, dtype)
    turned_second = rounded(second * cos, dtype) + rounded(first * sin, dtype)
    tl.store(target, turned_first.to(dtype), mask)
    tl.store(target + R, turned_second.to(dtype), mask)


def decode_latents(
    q_RNX: torch.Tensor,
    latents: torch.Tensor,
    page_table_SP: torch.Tensor,
    slot_R: torch.Tensor,
    num_tokens_S: torch.Tensor,
    out_RNL: torch.Tensor,
    partial: Workspace | None,
    num_splits: int,
    *,
    scale: float,
) -> None:
    """Row r attends to positions 0..num_tokens[slot[r]]-1; one split needs no workspace."""
    num_rows, num_heads, cached_dim = q_RNX.shape
    latent_dim, page_size = out_RNL.shape[2], latents.shape[1]
    num_tiles, heads = head_tiles(num_heads)
    device, pairs = device_of(q_RNX.device), max(_MIN_ROWS, heads)
    tiles = tiles_for(pairs, latent_dim, cached_dim, q_RNX.dtype, device)
    if num_splits == 1:
        partial = None
    width = padded(latent_dim)
    _decode_latents_kernel[(num_tiles, num_rows, num_splits)](
        q_RNX, latents, page_table_SP, slot_R, num_tokens_S, out_RNL,
        partial and partial.result, partial and partial.log_weight, partial and partial.arrived,
        page_table_SP.stride(0), scale_log2e(scale, cached_dim), _MIN_SPLIT,
        N=num_heads,
        HEADS=heads,
        CHUNK=min(num_splits, max(1, _FOLDED // (heads * width))),
        PAIRS=pairs,
        LATENT=latent_dim,
        ROPE=cached_dim - latent_dim,
        PADDED=width,
        PADDED_ROPE=padded(cached_dim - latent_dim),
        PAGE_SIZE=page_size,
        NUM_SPLITS=num_splits,
        TILE=tiles.keys,
        LONG_SPLIT=LONG_SPLIT,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **overlapping(OVERLAP),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["page_table", "slots", "lengths"],
)
def _decode_latents_kernel(
    q, latents, page_table, slots, lengths, out, partial_result, partial_weight, arrived,
    table_stride, scale_log2e, min_split,
    N: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr, PAIRS: tl.constexpr,
    LATENT: tl.constexpr, ROPE: tl.constexpr, PADDED: tl.constexpr, PADDED_ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, NUM_SPLITS: tl.constexpr, TILE: tl.constexpr,
    LONG_SPLIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    head_tile, split = tl.program_id(0), tl.program_id(2)
    row = tl.program_id(1).to(tl.int64)
    # No kernel of a forward writes these: they are read before the previous kernel has ended.
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(lengths + slot)
    await_previous(OVERLAP)
    begin, end, used = 0, length, 1
    if NUM_SPLITS > 1:
        used, span = cut_row(length, min_split, NUM_SPLITS, CHUNK, TILE, LONG_SPLIT)  # pyright: ignore[reportGeneralTypeIssues]  # inlined
        if split >= used:
            return
        begin = split * span
        end = tl.minimum(begin + span, length)

    head_M = tl.arange(0, PAIRS)
    num_heads = tl.minimum(N - head_tile * HEADS, HEADS)
    real_M = head_M < num_heads
    pair_M = row * N + head_tile * HEADS + head_M
    max_M, sum_M, acc_ML = _attend_latents(
        q, latents, page_table + slot * table_stride,
        pair_M, real_M, tl.full([PAIRS], 0, tl.int32) + (end - 1),
        begin, end, scale_log2e,
        LATENT, ROPE, PADDED, PADDED_ROPE, PAGE_SIZE, TILE,
    )  # fmt: skip
    if used == 1:
        _store_result(out, pair_M, real_M, sum_M, acc_ML, LATENT)
    elif NUM_SPLITS > 1:
        end_split(
            max_M, sum_M, acc_ML, out + (row * N + head_tile * HEADS) * LATENT, partial_result,
            partial_weight, arrived, row * tl.num_programs(0) + head_tile, split, used, num_heads,
            HEADS, LATENT, PADDED, NUM_SPLITS, HEADS, CHUNK,
        )  # fmt: skip


def prefill_latents(
    q_TNX: torch.Tensor,
    latents: torch.Tensor,
    pages_CP: torch.Tensor,
    first_row_C1: torch.Tensor,
    first_position_C: torch.Tensor,
    out_TNL: torch.Tensor,
    max_rows: int,
    *,
    scale: float,
) -> None:
    """Chunk c owns rows first_row[c]..first_row[c+1]-1, at most `max_rows`, at the positions from
    first_position[c] on; a row attends to its page table's positions up to its own."""
    _, num_heads, cached_dim = q_TNX.shape
    latent_dim, page_size = out_TNL.shape[2], latents.shape[1]
    num_tiles, heads = head_tiles(num_heads)
    pairs = max(heads, _MIN_ROWS)
    if q_TNX.dtype != torch.float32 and max_rows * heads > pairs:
        pairs = _PREFILL_PAIRS  # float32 has no tensor-core product, nor room for so many
    tiles = tiles_for(pairs, latent_dim, cached_dim, q_TNX.dtype, device_of(q_TNX.device))
    grid = (triton.cdiv(max_rows, pairs // heads), num_tiles, len(first_position_C))
    _prefill_latents_kernel[grid](
        q_TNX, latents, pages_CP, first_row_C1, first_position_C, out_TNL,
        pages_CP.stride(0), scale_log2e(scale, cached_dim),
        N=num_heads,
        HEADS=heads,
        PAIRS=pairs,
        LATENT=latent_dim,
        ROPE=cached_dim - latent_dim,
        PADDED=padded(latent_dim),
        PADDED_ROPE=padded(cached_dim - latent_dim),
        PAGE_SIZE=page_size,
        TILE=tiles.keys,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["page_table", "first_rows", "first_positions"],
)
def _prefill_latents_kernel(
    q, latents, page_table, first_rows, first_positions, out, table_stride, scale_log2e,
    N: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    LATENT: tl.constexpr, ROPE: tl.constexpr, PADDED: tl.constexpr, PADDED_ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # The last rows of a chunk have the most keys, so they start first for balance.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head_tile = tl.program_id(1)
    chunk = tl.program_id(2).to(tl.int64)
    TILE_ROWS: tl.constexpr = PAIRS // HEADS
    first_row = tl.load(first_rows + chunk)
    num_rows = tl.load(first_rows + chunk + 1) - first_row
    begin = tile * TILE_ROWS
    if begin >= num_rows:
        return
    pair_M = tl.arange(0, PAIRS)
    row_M, head_M = begin + pair_M // HEADS, head_tile * HEADS + pair_M % HEADS
    real_M = (head_M < N) & (row_M < num_rows)
    first_position = tl.load(first_positions + chunk)
    end = first_position + tl.minimum(begin + TILE_ROWS, num_rows)
    place_M = (first_row + row_M).to(tl.int64) * N + head_M
    _, sum_M, acc_ML = _attend_latents(  # pyright: ignore[reportGeneralTypeIssues]  # inlined
        q, latents, page_table + chunk * table_stride,
        place_M, real_M, first_position + row_M,
        0, end, scale_log2e,
        LATENT, ROPE, PADDED, PADDED_ROPE, PAGE_SIZE, TILE,
    )  # fmt: skip
    _store_result(out, place_M, real_M, sum_M, acc_ML, LATENT)


@triton.jit
def _attend_latents(
    q,
    latents,
    pages,  # pointer to the sequence's row of the page table
    pair_M,  # of the queries, in units of X numbers
    real_M,
    position_M,  # the last that each of them sees
    begin,
    end,
    scale_log2e,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """(max, sum, acc) of positions begin..end-1, the first of which every row sees."""
    WIDTH: tl.constexpr = LATENT + ROPE
    dim_L, dim_R = tl.arange(0, PADDED), tl.arange(0, PADDED_ROPE)
    q += pair_M.to(tl.int64)[:, None] * WIDTH
    is_latent_ML = real_M[:, None] & (dim_L < LATENT)[None, :]
    is_rope_MR = real_M[:, None] & (dim_R < ROPE)[None, :]
    q_ML = tl.load(q + dim_L[None, :], mask=is_latent_ML, other=0.0)
    q_MR = tl.load(q + LATENT + dim_R[None, :], mask=is_rope_MR, other=0.0)
    max_M = tl.full([real_M.shape[0]], float("-inf"), tl.float32)
    sum_M = tl.zeros([real_M.shape[0]], tl.float32)
    acc_ML = tl.zeros([real_M.shape[0], PADDED], tl.float32)
    tile_T = tl.arange(0, TILE)
    # Positions past the newest token read the newest again, never undefined memory.
    token_T = tl.minimum(begin + tile_T, end - 1)
    page_T = tl.load(pages + token_T // PAGE_SIZE)
    for start in range(begin, end, TILE):
        place_T = page_T.to(tl.int64) * PAGE_SIZE + token_T % PAGE_SIZE
        at_T1 = latents + (place_T * WIDTH)[:, None]
        latent_TL = load_heads(at_T1 + dim_L[None, :], dim_L, LATENT)
        rope_TR = load_heads(at_T1 + LATENT + dim_R[None, :], dim_R, ROPE)
        token_T = tl.minimum(start + TILE + tile_T, end - 1)
        page_T = tl.load(pages + token_T // PAGE_SIZE)

        score_MT = tl.dot(q_ML, tl.trans(latent_TL), input_precision="ieee")
        score_MT = tl.dot(q_MR, tl.trans(rope_TR), score_MT, input_precision="ieee")
        seen_MT = (start + tile_T)[None, :] <= position_M[:, None]
        score_MT = tl.where(seen_MT, score_MT * scale_log2e, float("-inf"))
        weight_MT, shrink_M, max_M, sum_M = weigh(score_MT, max_M, sum_M, False)
        acc_ML = acc_ML * shrink_M[:, None]
        acc_ML = tl.dot(weight_MT.to(latent_TL.dtype), latent_TL, acc_ML, input_precision="ieee")
    return max_M, sum_M, acc_ML


@triton.jit
def _store_result(out, pair_M, real_M, sum_M, acc_ML, LATENT: tl.constexpr):
    dim_L = tl.arange(0, acc_ML.shape[1])
    place_ML = pair_M.to(tl.int64)[:, None] * LATENT + dim_L[None, :]
    result_ML = (acc_ML / sum_M[:, None]).to(out.dtype.element_ty)
    tl.store(out + place_ML, result_ML, mask=real_M[:, None] & (dim_L < LATENT)[None, :])
