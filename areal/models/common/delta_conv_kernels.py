"""Kernels around the convolution of the gated delta rule, and their gradients.

`mix_kernel` computes the convolution over the tokens of a sequence, silu, and for queries and keys
the unit length, of one head in one pass, in float32; `mix_back_kernel` the gradients.

The tokens before the first of a sequence are zeros, or the last W - 1 rows of what it has had
before, out of a cache `[S, W - 1, X]`: of sequence r those numbered `from[r]`.
"""

# Triton unrolls loops over tuples that grow, of which the checker knows the first length only.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false

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
    x_ptr, weight_ptr, position_ptr, d_out_ptr, d_x_ptr, d_weight_ptr, T, X, first, num_scaled,
    scale, eps,
    DIM: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """A program walks down ROWS rows of a head, and keeps in registers what the next rows need: the
    W - 1 inputs before a row, and the gradients of these inputs as far as they are known. It has
    all of them for the first ROWS - W + 1 rows, which are its own. Rows are loaded AT_ONCE.

    `d_weight` has a part [W, X] of each program's own rows."""
    head = tl.program_id(1)
    column = first + head * DIM + tl.arange(0, DIM)
    begin = tl.program_id(0).to(tl.int64) * (ROWS - W + 1)
    factor = tl.where(head < num_scaled, scale, 1.0)
    position = tl.load(position_ptr + begin)
    weights, d_weights, before, d_before = (), (), (), ()
    for back in tl.static_range(W):
        weight = tl.load(weight_ptr + column * W + (W - 1 - back)).to(tl.float32)
        weights, d_weights = weights + (weight,), d_weights + (tl.zeros([DIM], tl.float32),)
    for back in tl.static_range(1, W):
        x = tl.load(x_ptr + (begin - back) * X + column, position >= back, 0.0).to(tl.float32)
        before, d_before = before + (x,), d_before + (tl.zeros([DIM], tl.float32),)
    for start in range(0, ROWS, AT_ONCE):
        xs, d_ys, positions = (), (), ()
        for i in tl.static_range(AT_ONCE):
            row = begin + start + i
            positions = positions + (tl.load(position_ptr + row, row < T, 0),)
            xs = xs + (tl.load(x_ptr + row * X + column, row < T, 0.0),)
            d_ys = d_ys + (tl.load(d_out_ptr + row * X + column, row < T, 0.0),)
        for i in tl.static_range(AT_ONCE):
            # Position 0 has no inputs before it; what they are is forgotten for the next rows too.
            inputs = (xs[i].to(tl.float32),)
            for back in tl.static_range(W - 1):
                inputs = inputs + (tl.where(positions[i] > 0, before[back], 0.0),)
            pre = inputs[0] * weights[0]
            for back in tl.static_range(1, W):
                pre += inputs[back] * weights[back]
            share = 1.0 / (1.0 + tl.exp(-pre))
            d_y = d_ys[i].to(tl.float32)
            if NORM:
                y = pre * share
                length = tl.rsqrt(tl.sum(y * y) + eps)
                d_y = (d_y - y * (tl.sum(d_y * y) * length * length)) * (length * factor)
            d_pre = d_y * share * (1.0 + pre * (1.0 - share))
            own = tl.where(start + i < ROWS - W + 1, d_pre, 0.0)
            d_x, sums = (d_pre * weights[0],), ()
            for back in tl.static_range(W):
                sums = sums + (d_weights[back] + own * inputs[back],)
            for back in tl.static_range(1, W):
                part = tl.where(positions[i] >= back, d_pre * weights[back], 0.0)
                d_x = d_x + (d_before[back - 1] + part,)
            row = begin + start + i - (W - 1)
            is_complete = (start + i >= W - 1) & (row < T)
            d_x_type = d_x_ptr.dtype.element_ty
            tl.store(d_x_ptr + row * X + column, d_x[W - 1].to(d_x_type), is_complete)
            before, d_before, d_weights = inputs[: W - 1], d_x[: W - 1], sums
    to = tl.program_id(0).to(tl.int64) * W * X + column
    for back in tl.static_range(W):
        tl.store(d_weight_ptr + to + (W - 1 - back) * X, d_weights[back])
