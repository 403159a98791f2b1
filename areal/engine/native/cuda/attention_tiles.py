"""The loop that decoding and prefill share: softmax(q k^T) v over key tiles gathered by page.

A cache is `[num_pages, K, page_size, H]`: the keys of one head in one page are contiguous, so a
tile of TILE tokens is TILE / page_size pieces of page_size * H elements, read in 16 byte accesses.
The pages of a tile are looked up while the previous tile is computed, so that addresses are ready
when its loads are issued. The softmax is online, in float32 and in base 2.

An FP8 cache is read in pairs, columns 2 p and 2 p + 1 as one element of 16 bits: `ldmatrix`, which
transposes operands on their way to the tensor cores, takes no smaller elements, and values in FP8
would be loaded byte by byte. Even and odd columns are two products of half the width.

A tile is `padded(head_dim)` wide, a power of two; the columns past the head are zeros that are
never read from memory. So heads of 80 or 96 cost the products of 128, but move their own bytes.

Shapes in the kernels: M query rows, T tokens of a tile, H head dim, padded, P = H / 2.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from triton import knobs

from areal.models.common.fp8_kernels import power_of_two_scale

_MIN_WIDTH = 16  # of a tensor-core product
_PAIRS = tl.constexpr(tl.pointer_type(tl.int16))
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)
# Of two pairs, (a0, b0) and (a1, b1): (a0, a1) and (b0, b1) in float16, by three instructions.
_UNPACK = tl.constexpr("""{
    .reg .b32 bytes; .reg .b16 even, odd;
    prmt.b32 bytes, $2, 0, 0x3120;
    mov.b32 {even, odd}, bytes;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")
MAX_SUMS = 128 * 256  # float32 of a program: half of the registers of a multiprocessor


def padded(head_dim: int, *, fp8: bool = False) -> int:
    """Columns of a tile of such heads; half of those of an FP8 cache make a product."""
    return max(_MIN_WIDTH * (1 + fp8), int(triton.next_power_of_2(head_dim)))


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
def _halves(x_MH):
    """Even and odd columns, [M, H / 2] each."""
    return tl.split(tl.reshape(x_MH, (x_MH.shape[0], x_MH.shape[1] // 2, 2)))


@triton.jit
def _unpack(pairs_TP, dtype: tl.constexpr):
    """FP8 numbers of the even and of the odd columns."""
    if dtype == tl.float16 and not _INTERPRETED:
        even_TP, odd_TP = tl.inline_asm_elementwise(
            _UNPACK.value, "=r,=r,r", [pairs_TP], (tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        even_TP = (pairs_TP & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
        odd_TP = ((pairs_TP >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
    return even_TP, odd_TP


@triton.jit
def weigh(score_MT, max_M, sum_M, WINDOWED: tl.constexpr):
    """exp2 of the scores over the largest so far; (max, sum) with them, and by how much this
    shrinks what was summed before."""
    new_max_M = tl.maximum(max_M, tl.max(score_MT, 1))
    shift_M = new_max_M
    if WINDOWED:  # a row may see nothing yet: -inf - -inf would be NaN
        shift_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    weight_MT = tl.exp2(score_MT - shift_M[:, None])
    shrink_M = tl.exp2(max_M - shift_M)
    return weight_MT, shrink_M, new_max_M, sum_M * shrink_M + tl.sum(weight_MT, 1)


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
    FP8: tl.constexpr = key_scales is not None  # pyright: ignore[reportAssignmentType]  # Triton's
    PACKED: tl.constexpr = FP8 + 1  # numbers of an element
    if FP8:
        keys, values = keys.to(_PAIRS), values.to(_PAIRS)
        q_MH, q_factor_M = _float16_rows(q_MH)  # pyright: ignore[reportGeneralTypeIssues]  # inlined
        q_factor_M *= scale_log2e
        q_even_MP, q_odd_MP = _halves(q_MH)  # pyright: ignore[reportGeneralTypeIssues]
        even_MP, odd_MP = _halves(acc_MH)  # pyright: ignore[reportGeneralTypeIssues]
    dim_H, tile_T = tl.arange(0, q_MH.shape[1] // PACKED), tl.arange(0, TILE)
    page_tokens = page_stride // HEAD_DIM
    token_T = tl.minimum(begin + tile_T, newest)
    page_T = tl.load(pages + token_T // PAGE_SIZE)
    for start in range(begin, end, TILE):
        # Positions past the newest token read the newest again, never undefined memory.
        place_T = page_T.to(tl.int64) * page_tokens + token_T % PAGE_SIZE
        element_TH = (place_T * (HEAD_DIM // PACKED))[:, None] + dim_H[None, :]
        k_TH = load_heads(keys + element_TH, dim_H, HEAD_DIM // PACKED)
        v_TH = load_heads(values + element_TH, dim_H, HEAD_DIM // PACKED)
        if FP8:
            k_scale_T = tl.load(key_scales + place_T)
            v_scale_T = tl.load(value_scales + place_T)
            top_scale = tl.max(v_scale_T, 0)
        token_T = tl.minimum(start + TILE + tile_T, newest)
        page_T = tl.load(pages + token_T // PAGE_SIZE)

        if FP8:
            k_even_TP, k_odd_TP = _unpack(k_TH, q_MH.dtype)  # pyright: ignore[reportGeneralTypeIssues]
            score_MT = tl.dot(q_even_MP, tl.trans(k_even_TP), input_precision="ieee")
            score_MT = tl.dot(q_odd_MP, tl.trans(k_odd_TP), score_MT, input_precision="ieee")
            score_MT *= q_factor_M[:, None] * k_scale_T[None, :]
        else:
            score_MT = tl.dot(q_MH, tl.trans(k_TH), input_precision="ieee")
            score_MT *= scale_log2e
        if MASKED:
            seen_MT = (start + tile_T)[None, :] <= position_M[:, None]
            if WINDOWED:
                seen_MT &= (start + tile_T)[None, :] > position_M[:, None] - window
            score_MT = tl.where(seen_MT, score_MT, float("-inf"))
        weight_MT, shrink_M, max_M, sum_M = weigh(score_MT, max_M, sum_M, WINDOWED)  # pyright: ignore[reportGeneralTypeIssues]
        if FP8:
            # At most 1, which float16 has room for.
            weight_MT = (weight_MT * (v_scale_T * (1 / top_scale))[None, :]).to(q_MH.dtype)
            v_even_TP, v_odd_TP = _unpack(v_TH, q_MH.dtype)  # pyright: ignore[reportGeneralTypeIssues]
            new_even_MP = tl.dot(weight_MT, v_even_TP, input_precision="ieee")
            new_odd_MP = tl.dot(weight_MT, v_odd_TP, input_precision="ieee")
            even_MP = even_MP * shrink_M[:, None] + new_even_MP * top_scale
            odd_MP = odd_MP * shrink_M[:, None] + new_odd_MP * top_scale
        else:
            acc_MH = acc_MH * shrink_M[:, None]
            acc_MH = tl.dot(weight_MT.to(v_TH.dtype), v_TH, acc_MH, input_precision="ieee")
    if FP8:
        acc_MH = tl.reshape(tl.join(even_MP, odd_MP), acc_MH.shape)
    return max_M, sum_M, acc_MH
