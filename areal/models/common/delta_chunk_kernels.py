"""Kernels of the gated delta rule in chunks (delta_rule.py has the equations), and their gradients.

A program computes one chunk of one value head, or the states of one sequence and head from chunk to
chunk. Products are of the dtype of the inputs with float32 sums; states and the sums of decays are
float32. The triangular system of a chunk is inverted in blocks of 16 rows: each diagonal block row
by row, then, with D the inverted diagonal and P = D (A - diagonal), by X = D - P X from X = D.

    forward    solve_kernel -> states_kernel -> outputs_kernel
    backward   values_back_kernel -> states_back_kernel -> chunk_back_kernel -> solve_back_kernel

| tensor  | shape     | what                                                                       |
|---------|-----------|----------------------------------------------------------------------------|
| mixed   | [T, X]    | queries, keys and values of all heads                                      |
| sums    | [T, N]    | decay since the chunk began, float32                                       |
| inverse | [T, N, C] | rows of (I + L)^-1                                                         |
| reads   | [T, N, K] | W = (I + L)^-1 beta exp(G) K: what the state's answer is subtracted by     |
| writes  | [T, N, V] | U = (I + L)^-1 beta V - W S0: the corrections                              |
| states  | [M, N, K, V] | S0, before each chunk                                                   |

Shape legend: as in delta_rule.py; BK and BV are blocks of key and value dims.
"""

# To the type checker a function of a kernel never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows(bounds_ptr, m, C: tl.constexpr):
    """The tokens of chunk `m`, and which of its C places have one."""
    start, end = tl.load(bounds_ptr + 2 * m), tl.load(bounds_ptr + 2 * m + 1)
    row = start + tl.arange(0, C)
    return row.to(tl.int64), row < end, end.to(tl.int64) - 1


@triton.jit
def _tile(ptr, row, inside, stride, first, WIDTH: tl.constexpr):
    """[C, WIDTH] of the columns from `first` on."""
    column = first + tl.arange(0, WIDTH)
    return tl.load(ptr + row[:, None] * stride + column[None, :], inside[:, None], 0.0)


@triton.jit
def _put(ptr, row, inside, stride, first, tile, WIDTH: tl.constexpr):
    column = first + tl.arange(0, WIDTH)
    place = ptr + row[:, None] * stride + column[None, :]
    tl.store(place, tile.to(ptr.dtype.element_ty), inside[:, None])


@triton.jit
def _falling(sums, inside, C: tl.constexpr, STRICT: tl.constexpr):
    """exp(G_i - G_j) [C, C] below the diagonal (and on it, if not STRICT), 0 elsewhere.

    Masked before the exponential, which would overflow above the diagonal."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    below = inside[:, None] & ((i > j) if STRICT else (i >= j))
    return tl.where(below, tl.exp(tl.where(below, sums[:, None] - sums[None, :], 0.0)), 0.0)


@triton.jit
def _inverse(A, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower A, float32."""
    B: tl.constexpr = C // 16
    block = tl.arange(0, B)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    blocks = tl.reshape(A, [B, 16, B, 16])
    diagonal = tl.sum(tl.where(same, blocks, 0.0), axis=2)
    row = tl.arange(0, 16)[None, :, None]
    solved = tl.where(row == tl.arange(0, 16)[None, None, :], 1.0, 0.0)
    solved = tl.broadcast_to(solved, [B, 16, 16])
    for i in range(1, 16):
        factors = tl.sum(tl.where(row == i, diagonal, 0.0), axis=1)
        known = tl.sum(factors[:, :, None] * solved, axis=1)
        solved = tl.where(row == i, solved - known[:, None, :], solved)
    D = tl.reshape(tl.where(same, solved[:, :, None, :], 0.0), [C, C])
    X = D
    if B > 1:
        rest = tl.reshape(tl.where(same, 0.0, blocks), [C, C])
        P = tl.dot(D, rest, input_precision=PRECISION)
        for _ in tl.static_range(B - 1):
            X = D - tl.dot(P, X, input_precision=PRECISION)
    return X


@triton.jit
def solve_kernel(
    mixed_ptr, decay_ptr, beta_ptr, bounds_ptr, sums_ptr, inverse_ptr, reads_ptr, writes_ptr,
    stride,
    N: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    m, n = tl.program_id(0), tl.program_id(1)
    row, inside, _ = _rows(bounds_ptr, m, C)
    dtype: tl.constexpr = mixed_ptr.dtype.element_ty
    sums = tl.cumsum(tl.load(decay_ptr + row * N + n, inside, 0.0), 0)
    tl.store(sums_ptr + row * N + n, sums, inside)
    beta = tl.load(beta_ptr + row * N + n, inside, 0.0).to(tl.float32)
    head = n // (N // H)
    k = _tile(mixed_ptr, row, inside, stride, (H + head) * K, K)
    kk = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    A = kk * beta[:, None] * _falling(sums, inside, C, True)
    inverse = _inverse(A, C, PRECISION).to(dtype)
    _put(inverse_ptr + n * C, row, inside, N * C, 0, inverse, C)
    scaled_k = (k.to(tl.float32) * (beta * tl.exp(sums))[:, None]).to(dtype)
    reads = tl.dot(inverse, scaled_k, input_precision=PRECISION)
    _put(reads_ptr + n * K, row, inside, N * K, 0, reads, K)
    v = _tile(mixed_ptr, row, inside, stride, 2 * H * K + n * V, V)
    scaled_v = (v.to(tl.float32) * beta[:, None]).to(dtype)
    writes = tl.dot(inverse, scaled_v, input_precision=PRECISION)
    _put(writes_ptr + n * V, row, inside, N * V, 0, writes, V)


@triton.jit
def states_kernel(
    mixed_ptr, sums_ptr, reads_ptr, writes_ptr, states_ptr, bounds_ptr, first_ptr,
    cache_ptr, from_ptr, to_ptr, stride,
    N: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Subtracts W S0 from `writes`, in place.

    With a cache [S, N, K, V] of states (float32) sequence r starts from the one numbered `from[r]`,
    and the state after chunk m is kept as `to[m, 0]` and `to[m, 1]`, where not -1."""
    column, n, r = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    dtype: tl.constexpr = mixed_ptr.dtype.element_ty
    head = n // (N // H)
    place = tl.arange(0, K)[:, None] * V + column + tl.arange(0, BV)[None, :]
    state = tl.zeros([K, BV], tl.float32)
    if cache_ptr is not None:
        number = tl.load(from_ptr + r).to(tl.int64)
        state = tl.load(cache_ptr + (number * N + n) * K * V + place)
    first, stop = tl.load(first_ptr + r), tl.load(first_ptr + r + 1)
    states_ptr += (first.to(tl.int64) * N + n) * K * V
    for m in range(first, stop):
        row, inside, last = _rows(bounds_ptr, m, C)
        tl.store(states_ptr + place, state.to(dtype))
        states_ptr += N * K * V
        sums = tl.load(sums_ptr + row * N + n, inside, 0.0)
        end = tl.load(sums_ptr + last * N + n)
        reads = _tile(reads_ptr + n * K, row, inside, N * K, 0, K)
        writes = _tile(writes_ptr + n * V, row, inside, N * V, column, BV).to(tl.float32)
        writes -= tl.dot(reads, state.to(dtype), input_precision=PRECISION)
        _put(writes_ptr + n * V, row, inside, N * V, column, writes, BV)
        k = _tile(mixed_ptr, row, inside, stride, (H + head) * K, K)
        # Places without a token wrote nothing, whatever their factor.
        fading = tl.where(inside, tl.exp(end - sums), 0.0)
        scaled = (writes * fading[:, None]).to(dtype)
        state = state * tl.exp(end) + tl.dot(tl.trans(k), scaled, input_precision=PRECISION)
        if cache_ptr is not None:
            for which in tl.static_range(2):
                to = tl.load(to_ptr + 2 * m + which).to(tl.int64)
                if to >= 0:
                    tl.store(cache_ptr + (to * N + n) * K * V + place, state)


@triton.jit
def _scores(
    mixed_ptr, sums_ptr, row, inside, stride, n,
    N: tl.constexpr, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries and sums of a chunk, and how much each token reads of those up to its own [C, C]."""
    head = n // (N // H)
    q = _tile(mixed_ptr, row, inside, stride, head * K, K)
    k = _tile(mixed_ptr, row, inside, stride, (H + head) * K, K)
    sums = tl.load(sums_ptr + row * N + n, inside, 0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * _falling(sums, inside, C, False)
    return q, sums, scores


@triton.jit
def outputs_kernel(
    mixed_ptr, sums_ptr, writes_ptr, states_ptr, bounds_ptr, out_ptr, stride,
    N: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    m, n, column = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BV
    row, inside, _ = _rows(bounds_ptr, m, C)
    dtype: tl.constexpr = mixed_ptr.dtype.element_ty
    q, sums, scores = _scores(mixed_ptr, sums_ptr, row, inside, stride, n, N, H, K, C, PRECISION)
    place = tl.arange(0, K)[:, None] * V + column + tl.arange(0, BV)[None, :]
    state = tl.load(states_ptr + (m.to(tl.int64) * N + n) * K * V + place)
    out = tl.dot(q, state, input_precision=PRECISION) * tl.exp(sums)[:, None]
    writes = _tile(writes_ptr + n * V, row, inside, N * V, column, BV)
    out += tl.dot(scores.to(dtype), writes, input_precision=PRECISION)
    _put(out_ptr + n * V, row, inside, N * V, column, out, BV)


@triton.jit
def values_back_kernel(
    mixed_ptr, sums_ptr, bounds_ptr, d_out_ptr, d_writes_ptr, stride,
    N: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the corrections by the outputs of their own chunk."""
    m, n, column = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BV
    row, inside, _ = _rows(bounds_ptr, m, C)
    dtype: tl.constexpr = mixed_ptr.dtype.element_ty
    _, _, scores = _scores(mixed_ptr, sums_ptr, row, inside, stride, n, N, H, K, C, PRECISION)
    d_out = _tile(d_out_ptr + n * V, row, inside, N * V, column, BV)
    d_writes = tl.dot(tl.trans(scores.to(dtype)), d_out, input_precision=PRECISION)
    _put(d_writes_ptr + n * V, row, inside, N * V, column, d_writes, BV)


@triton.jit
def states_back_kernel(
    mixed_ptr, sums_ptr, reads_ptr, bounds_ptr, first_ptr, d_out_ptr, d_writes_ptr, d_states_ptr,
    stride,
    N: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the state after each chunk; adds their part to `d_writes`, in place."""
    column, n, r = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    dtype: tl.constexpr = mixed_ptr.dtype.element_ty
    head = n // (N // H)
    place = tl.arange(0, K)[:, None] * V + column + tl.arange(0, BV)[None, :]
    d_state = tl.zeros([K, BV], tl.float32)
    first, stop = tl.load(first_ptr + r), tl.load(first_ptr + r + 1)
    d_states_ptr += ((stop - 1).to(tl.int64) * N + n) * K * V
    for back in range(0, stop - first):
        row, inside, last = _rows(bounds_ptr, stop - 1 - back, C)
        tl.store(d_states_ptr + place, d_state.to(dtype))
        d_states_ptr -= N * K * V
        sums = tl.load(sums_ptr + row * N + n, inside, 0.0)
        end = tl.load(sums_ptr + last * N + n)
        k = _tile(mixed_ptr, row, inside, stride, (H + head) * K, K)
        fading = tl.where(inside, tl.exp(end - sums), 0.0)
        d_writes = _tile(d_writes_ptr + n * V, row, inside, N * V, column, BV).to(tl.float32)
        d_writes += tl.dot(k, d_state.to(dtype), input_precision=PRECISION) * fading[:, None]
        _put(d_writes_ptr + n * V, row, inside, N * V, column, d_writes, BV)
        q = _tile(mixed_ptr, row, inside, stride, head * K, K)
        reads = _tile(reads_ptr + n * K, row, inside, N * K, 0, K)
        d_out = _tile(d_out_ptr + n * V, row, inside, N * V, column, BV).to(tl.float32)
        d_out = (d_out * tl.exp(sums)[:, None]).to(dtype)
        d_state = d_state * tl.exp(end)
        d_state += tl.dot(tl.trans(q), d_out, input_precision=PRECISION)
        d_state -= tl.dot(tl.trans(reads), d_writes.to(dtype), input_precision=PRECISION)


@triton.jit
def chunk_back_kernel(
    mixed_ptr, sums_ptr, writes_ptr, states_ptr, bounds_ptr, d_out_ptr, d_writes_ptr,
    d_states_ptr, d_mixed_ptr, d_reads_ptr, d_sums_ptr, stride, sums_stride,
    N: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, of `reads`, and of keys and `sums` but for those by the system.

    A sum's gradient is q dq - k dk, whatever the product it was a factor of; that of the last one
    has the chunk's decay of the state besides. `d_sums` has a part for each block of key dims."""
    m, n, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column = number * BK
    row, inside, last = _rows(bounds_ptr, m, C)
    dtype: tl.constexpr = mixed_ptr.dtype.element_ty
    head = n // (N // H)
    sums = tl.load(sums_ptr + row * N + n, inside, 0.0)
    end = tl.load(sums_ptr + last * N + n)
    dq, dk = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    d_reads, d_scores = tl.zeros([C, BK], tl.float32), tl.zeros([C, C], tl.float32)
    of_state = 0.0
    for start in range(0, V, BV):
        d_out = _tile(d_out_ptr + n * V, row, inside, N * V, start, BV)
        writes = _tile(writes_ptr + n * V, row, inside, N * V, start, BV)
        d_writes = _tile(d_writes_ptr + n * V, row, inside, N * V, start, BV)
        place = (column + tl.arange(0, BK))[:, None] * V + start + tl.arange(0, BV)[None, :]
        place += (m.to(tl.int64) * N + n) * K * V
        state, d_state = tl.load(states_ptr + place), tl.load(d_states_ptr + place)
        d_scores += tl.dot(d_out, tl.trans(writes), input_precision=PRECISION)
        dq += tl.dot(d_out, tl.trans(state), input_precision=PRECISION)
        dk += tl.dot(writes, tl.trans(d_state), input_precision=PRECISION)
        d_reads -= tl.dot(d_writes, tl.trans(state), input_precision=PRECISION)
        of_state += tl.sum(state.to(tl.float32) * d_state.to(tl.float32))
    _put(d_reads_ptr + n * K, row, inside, N * K, column, d_reads, BK)
    q = _tile(mixed_ptr, row, inside, stride, head * K + column, BK)
    k = _tile(mixed_ptr, row, inside, stride, (H + head) * K + column, BK)
    dq *= tl.exp(sums)[:, None]
    dk *= tl.where(inside, tl.exp(end - sums), 0.0)[:, None]
    of_end = of_state * tl.exp(end) + tl.sum(dk * k.to(tl.float32))
    scores = (d_scores * _falling(sums, inside, C, False)).to(dtype)
    dq += tl.dot(scores, k, input_precision=PRECISION)
    dk += tl.dot(tl.trans(scores), q, input_precision=PRECISION)
    width = 2 * N * K + N * V
    _put(d_mixed_ptr, row, inside, width, n * K + column, dq, BK)
    _put(d_mixed_ptr, row, inside, width, (N + n) * K + column, dk, BK)
    d_sums = tl.sum(dq * q.to(tl.float32) - dk * k.to(tl.float32), axis=1)
    d_sums += tl.where(row == last, of_end, 0.0)
    tl.store(d_sums_ptr + number * sums_stride + row * N + n, d_sums, inside)


@triton.jit
def solve_back_kernel(
    mixed_ptr, beta_ptr, sums_ptr, inverse_ptr, bounds_ptr, d_writes_ptr, d_reads_ptr, d_sums_ptr,
    d_mixed_ptr, d_decay_ptr, d_beta_ptr, stride, sums_stride,
    N: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients through the system of a chunk. The inverse X of I + L has dL = -X' dX X'."""
    m, n = tl.program_id(0), tl.program_id(1)
    row, inside, _ = _rows(bounds_ptr, m, C)
    dtype: tl.constexpr = mixed_ptr.dtype.element_ty
    head, width = n // (N // H), 2 * N * K + N * V
    sums = tl.load(sums_ptr + row * N + n, inside, 0.0)
    beta = tl.load(beta_ptr + row * N + n, inside, 0.0).to(tl.float32)
    inverse = _tile(inverse_ptr + n * C, row, inside, N * C, 0, C)
    turned = tl.trans(inverse)

    v = _tile(mixed_ptr, row, inside, stride, 2 * H * K + n * V, V).to(tl.float32)
    d_writes = _tile(d_writes_ptr + n * V, row, inside, N * V, 0, V)
    scaled_v = (v * beta[:, None]).to(dtype)
    d_inverse = tl.dot(d_writes, tl.trans(scaled_v), input_precision=PRECISION)
    d_scaled_v = tl.dot(turned, d_writes, input_precision=PRECISION)
    d_beta = tl.sum(d_scaled_v * v, axis=1)
    _put(d_mixed_ptr, row, inside, width, 2 * N * K + n * V, d_scaled_v * beta[:, None], V)

    k = _tile(mixed_ptr, row, inside, stride, (H + head) * K, K)
    d_reads = _tile(d_reads_ptr + n * K, row, inside, N * K, 0, K)
    factor = beta * tl.exp(sums)
    scaled_k = (k.to(tl.float32) * factor[:, None]).to(dtype)
    d_inverse += tl.dot(d_reads, tl.trans(scaled_k), input_precision=PRECISION)
    d_scaled_k = tl.dot(turned, d_reads, input_precision=PRECISION)
    by_k = tl.sum(d_scaled_k * k.to(tl.float32), axis=1)
    d_beta += by_k * tl.exp(sums)
    d_sums = by_k * factor

    d_system = tl.dot(d_inverse.to(dtype), turned, input_precision=PRECISION).to(dtype)
    d_system = -tl.dot(turned, d_system, input_precision=PRECISION) * _falling(
        sums, inside, C, True
    )
    kk = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    d_beta += tl.sum(d_system * kk, axis=1)
    d_system *= beta[:, None]
    d_sums += tl.sum(d_system * kk, axis=1) - tl.sum(d_system * kk, axis=0)
    both = (d_system + tl.trans(d_system)).to(dtype)
    dk = _tile(d_mixed_ptr, row, inside, width, (N + n) * K, K).to(tl.float32)
    dk += d_scaled_k * factor[:, None] + tl.dot(both, k, input_precision=PRECISION)
    _put(d_mixed_ptr, row, inside, width, (N + n) * K, dk, K)
    tl.store(d_beta_ptr + row * N + n, d_beta, inside)
    for number in tl.static_range(BLOCKS):
        d_sums += tl.load(d_sums_ptr + number * sums_stride + row * N + n, inside, 0.0)
    # Each decay is part of all sums from its own on.
    d_decay = tl.sum(d_sums) - tl.cumsum(d_sums, 0) + d_sums
    tl.store(d_decay_ptr + row * N + n, d_decay, inside)
