"""Kernels around the convolution of the gated delta rule, and their gradients.

`mix_kernel` computes the convolution over the tokens of a sequence, silu, and for queries and keys
the unit length, of one head in one pass, in float32. Its gradient is in two: back to the sums of
the convolution (`mix_back_kernel`), and from there to its inputs and weights (`conv_back_kernel`).

The tokens before the first of a sequence are zeros, or the last W - 1 rows of what it has had
before, out of a cache `[S, W - 1, X]`: of sequence r those numbered `from[r]`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _convolved(
    x_ptr, weight_ptr, position_ptr, cache_ptr, from_ptr, sequence_ptr, row, inside, column, X,
    stride, W: tl.constexpr,
):  # fmt: skip
    """[rows, columns] of the convolution, float32. `position` counts the tokens of a sequence.

    Rows of `x` are `stride` apart, those of the cache X."""
    position = tl.load(position_ptr + row, inside, 0)
    if cache_ptr is not None:
        sequence = tl.load(sequence_ptr + row, inside, 0)
        before = tl.load(from_ptr + sequence, inside, 0).to(tl.int64) * (W - 1)
    pre = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    for back in tl.static_range(W):
        weight = tl.load(weight_ptr + column * W + (W - 1 - back)).to(tl.float32)
        own = inside & (position >= back)
        place = (row - back)[:, None] * stride + column[None, :]
        x = tl.load(x_ptr + place, own[:, None], 0.0).to(tl.float32)
        if cache_ptr is not None:
            kept = (before + W - 1 + position - back)[:, None] * X + column[None, :]
            old = inside & (position < back)
            x += tl.load(cache_ptr + kept, old[:, None], 0.0).to(tl.float32)
        pre += x * weight[None, :]
    return pre


@triton.jit
def mix_kernel(
    x_ptr, weight_ptr, position_ptr, cache_ptr, from_ptr, sequence_ptr, out_ptr, T, X, stride,
    first, num_scaled, scale, eps,
    DIM: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The heads of DIM columns from column `first` on. With NORM they get length 1, the first
    `num_scaled` of them (queries) the length `scale`."""
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < T
    column = first + head * DIM + tl.arange(0, DIM)
    pre = _convolved(
        x_ptr, weight_ptr, position_ptr, cache_ptr, from_ptr, sequence_ptr, row, inside, column, X,
        stride, W,
    )  # fmt: skip
    y = pre / (1.0 + tl.exp(-pre))
    if NORM:
        factor = tl.where(head < num_scaled, scale, 1.0)
        y *= (tl.rsqrt(tl.sum(y * y, axis=1) + eps) * factor)[:, None]
    place = row[:, None] * X + column[None, :]
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), inside[:, None])


@triton.jit
def mix_back_kernel(
    x_ptr, weight_ptr, position_ptr, d_out_ptr, d_pre_ptr, T, X, first, num_scaled, scale, eps,
    DIM: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < T
    column = first + head * DIM + tl.arange(0, DIM)
    pre = _convolved(
        x_ptr, weight_ptr, position_ptr, None, None, None, row, inside, column, X, X, W
    )  # fmt: skip
    share = 1.0 / (1.0 + tl.exp(-pre))
    place = row[:, None] * X + column[None, :]
    d_y = tl.load(d_out_ptr + place, inside[:, None], 0.0).to(tl.float32)
    if NORM:
        y = pre * share
        length = tl.rsqrt(tl.sum(y * y, axis=1) + eps)
        factor = tl.where(head < num_scaled, scale, 1.0)
        along = tl.sum(d_y * y, axis=1) * length * length
        d_y = (d_y - y * along[:, None]) * (length * factor)[:, None]
    d_pre = d_y * share * (1.0 + pre * (1.0 - share))
    tl.store(d_pre_ptr + place, d_pre.to(d_pre_ptr.dtype.element_ty), inside[:, None])


@triton.jit
def conv_back_kernel(
    x_ptr, weight_ptr, position_ptr, d_pre_ptr, d_x_ptr, d_weight_ptr, T, X,
    W: tl.constexpr, PADDED_W: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """`d_weight` has a part [W, X] of each program's rows."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_column = column < X
    first = tl.program_id(0).to(tl.int64) * ROWS * TILES
    tap = tl.arange(0, PADDED_W)
    d_weight = tl.zeros([PADDED_W, ROWS, COLUMNS], tl.float32)
    for tile in range(TILES):
        row = first + tile * ROWS + tl.arange(0, ROWS)
        inside = (row < T)[:, None] & in_column[None, :]
        place = row[:, None] * X + column[None, :]
        x = tl.load(x_ptr + place, inside, 0.0).to(tl.float32)
        d_x = tl.zeros([ROWS, COLUMNS], tl.float32)
        for back in tl.static_range(W):
            later = row + back
            own = (later < T) & (tl.load(position_ptr + later, later < T, 0) >= back)
            mask = own[:, None] & in_column[None, :]
            weight = tl.load(weight_ptr + column * W + (W - 1 - back), in_column, 0.0)
            d_pre = tl.load(d_pre_ptr + place + back * X, mask, 0.0).to(tl.float32)
            d_x += d_pre * weight.to(tl.float32)[None, :]
            is_tap = (tap == W - 1 - back)[:, None, None]
            d_weight += tl.where(is_tap, (d_pre * x)[None, :, :], 0.0)
        tl.store(d_x_ptr + place, d_x.to(d_x_ptr.dtype.element_ty), inside)
    to = (tl.program_id(0).to(tl.int64) * W + tap)[:, None] * X + column[None, :]
    is_weight = (tap < W)[:, None] & in_column[None, :]
    tl.store(d_weight_ptr + to, tl.sum(d_weight, axis=1), is_weight)
