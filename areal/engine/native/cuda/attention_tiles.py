"""The loop that decoding and prefill share: softmax(q k^T) v over key tiles gathered by page.

A cache is `[num_pages, K, page_size, H]`: the keys of one head in one page are contiguous, so a
tile of TILE tokens is TILE / page_size pieces of page_size * H elements, read in 16 byte accesses.
The pages of a tile are looked up while the previous tile is computed, so that addresses are ready
when its loads are issued. The softmax is online, in float32 and in base 2.

A tile is `padded(head_dim)` wide, a power of two; the columns past the head are zeros that are
never read from memory. So heads of 80 or 96 cost the products of 128, but move their own bytes.

Shapes in the kernels: M query rows, T tokens of a tile, H head dim, padded.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from areal.models.common.fp8_kernels import power_of_two_scale

_MIN_WIDTH = 16  # of a tensor-core product
MAX_SUMS = 128 * 256  # float32 of a program: half of the registers of a multiprocessor


def padded(head_dim: int) -> int:
    """Columns of a tile of such heads."""
    return max(_MIN_WIDTH, int(triton.next_power_of_2(head_dim)))


def scale_log2e(scale: float | None, head_dim: int) -> float:
    """Factor on scores for a softmax in base 2; None: head_dim ** -0.5."""
    return (head_dim**-0.5 if scale is None else scale) * math.log2(math.e)


@triton.jit
def load_heads(pointers, dim_H, HEAD_DIM: tl.constexpr):
    """[rows, H] of memory that every row may read; zeros past the head."""
    if dim_H.shape[0] == HEAD_DIM:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=(dim_H < HEAD_DIM)[None, :], other=0.0)
    return x


@triton.jit
def _float16_rows(q_MH):
    """Rows over powers of two, and these: an FP8 cache is multiplied in float16, which is one
    conversion away from it, as bfloat16 is three. Its digits hold both; its exponents do not."""
    factor_M = power_of_two_scale(tl.max(tl.abs(q_MH.to(tl.float32)), 1))
    half_MH = q_MH.to(tl.float32) / factor_M[:, None]
    if q_MH.dtype.primitive_bitwidth == 16:
        half_MH = half_MH.to(tl.float16)
    return half_MH, factor_M


@triton.jit
def attend_tiles(
    q_MH,
    position_M,
    max_M,
    sum_M,
    acc_MH,
    keys,  # pointer to the first page, at the key/value head of the program
    values,
    key_scales,  # of an FP8 cache, likewise; else None
    value_scales,
    pages,  # pointer to the sequence's row of the page table
    begin,
    end,
    newest,  # last position that may be read; memory after it is undefined
    page_stride,
    scale_log2e,
    window,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Fold the keys of positions begin..end-1 into (max, sum, acc).

    A row sees positions up to its own, with WINDOWED the last `window` of them. With MASKED=False
    these are whole tiles, and every key must be visible to every row.
    """
    dim_H = tl.arange(0, q_MH.shape[1])
    tile_T = tl.arange(0, TILE)
    if key_scales is not None:
        q_MH, q_factor_M = _float16_rows(q_MH)  # pyright: ignore[reportGeneralTypeIssues]  # inlined
        q_factor_M *= scale_log2e
    token_T = tl.minimum(begin + tile_T, newest)
    page_T = tl.load(pages + token_T // PAGE_SIZE)
    for start in range(begin, end, TILE):
        # Positions past the newest token read the newest again, never undefined memory.
        element_T = page_T.to(tl.int64) * page_stride + (token_T % PAGE_SIZE) * HEAD_DIM
        element_TH = element_T[:, None] + dim_H[None, :]
        k_TH = load_heads(keys + element_TH, dim_H, HEAD_DIM)
        v_TH = load_heads(values + element_TH, dim_H, HEAD_DIM)
        if key_scales is not None:
            scale_T = element_T // HEAD_DIM
            k_scale_T = tl.load(key_scales + scale_T)
            v_scale_T = tl.load(value_scales + scale_T)
            top_scale = tl.max(v_scale_T, 0)
            k_TH, v_TH = k_TH.to(q_MH.dtype), v_TH.to(q_MH.dtype)
        token_T = tl.minimum(start + TILE + tile_T, newest)
        page_T = tl.load(pages + token_T // PAGE_SIZE)

        score_MT = tl.dot(q_MH, tl.trans(k_TH), input_precision="ieee")
        if key_scales is None:
            score_MT *= scale_log2e
        else:
            score_MT *= q_factor_M[:, None] * k_scale_T[None, :]
        if MASKED:
            seen_MT = (start + tile_T)[None, :] <= position_M[:, None]
            if WINDOWED:
                seen_MT &= (start + tile_T)[None, :] > position_M[:, None] - window
            score_MT = tl.where(seen_MT, score_MT, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(score_MT, 1))
        shift_M = new_max_M
        if WINDOWED:  # a row may see nothing yet: -inf - -inf would be NaN
            shift_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        weight_MT = tl.exp2(score_MT - shift_M[:, None])
        shrink_M = tl.exp2(max_M - shift_M)
        sum_M = sum_M * shrink_M + tl.sum(weight_MT, 1)
        acc_MH = acc_MH * shrink_M[:, None]
        if key_scales is None:
            acc_MH = tl.dot(weight_MT.to(v_TH.dtype), v_TH, acc_MH, input_precision="ieee")
        else:
            # At most 1, which float16 has room for.
            weight_MT *= (v_scale_T / top_scale)[None, :]
            out_MH = tl.dot(weight_MT.to(v_TH.dtype), v_TH, input_precision="ieee")
            acc_MH += out_MH * top_scale
        max_M = new_max_M
    return max_M, sum_M, acc_MH
