"""Kernels of hybrid decoders (gated_layers.py) between their matrix products.

| kernel         | rows     | computes                                                             |
|----------------|----------|----------------------------------------------------------------------|
| gated_rope     | any      | norms and rotates heads of queries and keys; writes keys and values  |
| convolve_step  | decoding | one token of the convolution, silu, unit lengths; moves on its rows  |
| recur_step     | decoding | one token of the delta rule and its gated norm; moves on the state   |
| gated_norm     | any      | the gated norm alone                                                 |
| add_shared     | any      | gates what all tokens share of a layer with experts, and adds it     |

A row of a step belongs to a slot, whose state they change in place. If its token ends a page, the
state after it is also kept as the slot's mark (state_cache.py). Padding rows belong to the scratch
slot, whose state is scratch, too.

Shape legend: T or R rows, N heads, K key/value heads or key dim, V value dim, H head dim, R pairs
that are rotated, X channels of the convolution, W its size, S slots; of experts: C choices of a
token, D model dim.
"""

# Launch options (num_warps, num_stages) are none of a kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from areal.engine.native.cuda.block_kernels import Norm, load_norm, rounded
from areal.engine.native.cuda.device import OVERLAP, await_previous, overlapping
from areal.models.common.args import DeltaArgs
from areal.models.common.delta_rule import NORM_EPS

_HEADS_PER_PROGRAM = 4


@dataclass(frozen=True, slots=True)
class SlotStates:
    """The slots of R rows, and by slot its state, its mark and how many tokens it has."""

    slot_R: torch.Tensor
    state_S: torch.Tensor
    mark_S: torch.Tensor
    num_tokens_S: torch.Tensor
    page_size: int


def gated_rope(
    qkv_TX: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    write_T: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_out_TNH: torch.Tensor,
    q_norm: Norm,
    k_norm: Norm,
) -> None:
    """As `rope_and_cache`, but of the 2 N H columns of queries a head has its query, then its gate,
    and only the leading 2 R dims of a head are rotated."""
    num_rows, num_heads, head_dim = q_out_TNH.shape
    _, num_kv_heads, page_size, _ = keys.shape
    assert (q_norm.eps, q_norm.offset) == (k_norm.eps, k_norm.offset)
    heads = num_heads + 2 * num_kv_heads
    block = triton.next_power_of_2(head_dim)
    _gated_rope_kernel[(num_rows, triton.cdiv(heads, _HEADS_PER_PROGRAM))](
        qkv_TX, cos_TR, sin_TR, write_T, keys, values, q_out_TNH, q_norm.weight, k_norm.weight,
        q_norm.eps,
        N=num_heads,
        K=num_kv_heads,
        PAGE=page_size,
        H=head_dim,
        R=cos_TR.shape[1],
        HEADS=_HEADS_PER_PROGRAM,
        BLOCK=block,
        OFFSET=q_norm.offset,
        num_warps=4,
        **overlapping(OVERLAP),
    )  # fmt: skip


@triton.jit
def _gated_rope_kernel(
    qkv_ptr, cos_ptr, sin_ptr, write_ptr, keys_ptr, values_ptr, q_ptr, q_norm_ptr, k_norm_ptr, eps,
    N: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, OFFSET: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    await_previous(OVERLAP)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_q, is_k = head < N, (head >= N) & (head < N + K)
    is_v = (head >= N + K) & (head < N + 2 * K)
    dim = tl.arange(0, BLOCK)
    # The dim that a rotated one is turned with.
    other = tl.where(dim < R, dim + R, tl.where(dim < 2 * R, dim - R, dim))
    inside = (head < N + 2 * K)[:, None] & (dim < H)[None, :]
    first = tl.where(is_q, 2 * head, N + head)[:, None] * H
    source = qkv_ptr + row * (2 * N + 2 * K) * H + first
    x = tl.load(source + dim[None, :], inside, 0.0).to(tl.float32)
    partner = tl.load(source + other[None, :], inside, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / H + eps)[:, None]
    normed = _normed(x * scale, is_q, q_norm_ptr, k_norm_ptr, dim, H, OFFSET, dtype)
    partner = _normed(partner * scale, is_q, q_norm_ptr, k_norm_ptr, other, H, OFFSET, dtype)
    angle = row * R + (dim % R)[None, :] + tl.zeros([HEADS, 1], tl.int32)
    is_turned = inside & (dim < 2 * R)[None, :]
    cos = tl.load(cos_ptr + angle, is_turned, 1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, is_turned, 0.0).to(tl.float32)
    side = rounded(partner * sin, dtype)
    turned = rounded(normed * cos, dtype) + tl.where((dim < R)[None, :], -side, side)
    to_q = q_ptr + (row * N + head[:, None]) * H + dim[None, :]
    tl.store(to_q, turned.to(dtype), inside & is_q[:, None])
    write = tl.load(write_ptr + row).to(tl.int64)
    kv_head = tl.where(head < N + K, head - N, head - N - K)[:, None]
    slot = ((write // PAGE * K + kv_head) * PAGE + write % PAGE) * H + dim[None, :]
    tl.store(keys_ptr + slot, turned.to(dtype), inside & is_k[:, None])
    tl.store(values_ptr + slot, x.to(dtype), inside & is_v[:, None])


@triton.jit
def _normed(
    x, is_q, q_norm_ptr, k_norm_ptr, dim, H: tl.constexpr, OFFSET: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    of_q = load_norm(q_norm_ptr + dim, dim < H, OFFSET)
    of_k = load_norm(k_norm_ptr + dim, dim < H, OFFSET)
    return rounded(x * tl.where(is_q[:, None], of_q[None, :], of_k[None, :]), dtype)


def convolve_step(
    projected_RY: torch.Tensor,
    kernel_XW: torch.Tensor,
    rows: torch.Tensor,
    slots: SlotStates,
    sizes: DeltaArgs,
) -> torch.Tensor:
    """Queries, keys and values [R, X] as `delta_kernels.mix` has them.

    The first X columns of `projected_RY` are the token's; `rows` [S, W - 1, X] are those before it,
    by state."""
    num_rows, width = len(projected_RY), sum(sizes.widths)
    mixed_RX = projected_RY.new_empty(num_rows, width)
    both, values = 2 * sizes.num_key_heads, sizes.num_value_heads
    # Number of heads, first column, dims of a head, and how many heads have length 1.
    parts = [(both, 0, sizes.key_dim, both), (values, both * sizes.key_dim, sizes.value_dim, 0)]
    if sizes.key_dim == sizes.value_dim:
        parts = [(both + values, 0, sizes.key_dim, both)]
    for heads, first, dim, num_normed in parts:
        _convolve_kernel[(num_rows, heads)](
            projected_RY, kernel_XW, rows, slots.slot_R, slots.state_S, slots.mark_S,
            slots.num_tokens_S, mixed_RX, projected_RY.shape[1], width, first, num_normed,
            sizes.num_key_heads, sizes.key_dim**-0.5, NORM_EPS,
            DIM=dim,
            BLOCK=triton.next_power_of_2(dim),
            W=sizes.conv_size,
            PAGE=slots.page_size,
            num_warps=1,
            **overlapping(OVERLAP),
        )  # fmt: skip
    return mixed_RX


@triton.jit
def _convolve_kernel(
    x_ptr, kernel_ptr, rows_ptr, slot_ptr, state_ptr, mark_ptr, num_tokens_ptr, out_ptr, Y, X,
    first, num_normed, num_scaled, scale, eps,
    DIM: tl.constexpr, BLOCK: tl.constexpr, W: tl.constexpr, PAGE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    await_previous(OVERLAP)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_ptr + row)
    state, mark = tl.load(state_ptr + slot).to(tl.int64), tl.load(mark_ptr + slot).to(tl.int64)
    ends_page = tl.load(num_tokens_ptr + slot) % PAGE == 0
    lane = tl.arange(0, BLOCK)
    inside = lane < DIM
    column = first + head * DIM + lane
    own, marked = rows_ptr + state * (W - 1) * X + column, rows_ptr + mark * (W - 1) * X + column
    pre = tl.zeros([BLOCK], tl.float32)
    for back in tl.static_range(W):
        if back < W - 1:
            x = tl.load(own + back * X, inside, 0.0)
        else:
            x = tl.load(x_ptr + row * Y + column, inside, 0.0)
        weight = tl.load(kernel_ptr + column * W + back, inside, 0.0).to(tl.float32)
        pre += x.to(tl.float32) * weight
        if back > 0:
            tl.store(own + (back - 1) * X, x, inside)
            tl.store(marked + (back - 1) * X, x, inside & ends_page)
    y = pre / (1.0 + tl.exp(-pre))
    length = tl.rsqrt(tl.sum(y * y) + eps) * tl.where(head < num_scaled, scale, 1.0)
    y *= tl.where(head < num_normed, length, 1.0)
    tl.store(out_ptr + row * X + column, y.to(dtype), inside)


@dataclass(frozen=True, slots=True)
class DeltaGates:
    """What a layer makes of its projections besides queries, keys and values."""

    log_rate_N: torch.Tensor
    decay_bias_N: torch.Tensor
    norm: Norm


def recur_step(
    mixed_RX: torch.Tensor,
    projected_RY: torch.Tensor,
    gates: DeltaGates,
    matrices: torch.Tensor,
    slots: SlotStates,
    sizes: DeltaArgs,
) -> torch.Tensor:
    """[R, N * V] after the gated norm. After the X columns of `projected_RY` come the gate [N * V],
    beta [N] and the decay [N], as they were projected; `matrices` [S, N, K, V] by state."""
    num_rows, heads = len(mixed_RX), sizes.num_value_heads
    out_RX = mixed_RX.new_empty(num_rows, heads * sizes.value_dim)
    _recur_kernel[(num_rows, heads)](
        mixed_RX, projected_RY, gates.log_rate_N, gates.decay_bias_N, gates.norm.weight, matrices,
        slots.slot_R, slots.state_S, slots.mark_S, slots.num_tokens_S, out_RX,
        projected_RY.shape[1], mixed_RX.shape[1], gates.norm.eps,
        N=heads,
        H=sizes.num_key_heads,
        K=sizes.key_dim,
        V=sizes.value_dim,
        BK=triton.next_power_of_2(sizes.key_dim),
        BV=triton.next_power_of_2(sizes.value_dim),
        PAGE=slots.page_size,
        num_warps=8,
        **overlapping(OVERLAP),
    )  # fmt: skip
    return out_RX


@triton.jit
def _recur_kernel(
    mixed_ptr, projected_ptr, log_rate_ptr, decay_bias_ptr, norm_ptr, matrices_ptr, slot_ptr,
    state_ptr, mark_ptr, num_tokens_ptr, out_ptr, Y, X, eps,
    N: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PAGE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    await_previous(OVERLAP)
    dtype: tl.constexpr = mixed_ptr.dtype.element_ty
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_ptr + row)
    state = tl.load(state_ptr + slot).to(tl.int64)
    key, value = tl.arange(0, BK), tl.arange(0, BV)
    inside = (key < K)[:, None] & (value < V)[None, :]
    place = n * K * V + key[:, None] * V + value[None, :]
    S = tl.load(matrices_ptr + state * N * K * V + place, inside, 0.0)

    mixed_ptr += row * X
    column = n // (N // H) * K + key
    q = tl.load(mixed_ptr + column, key < K, 0.0).to(tl.float32)
    k = tl.load(mixed_ptr + H * K + column, key < K, 0.0).to(tl.float32)
    v = tl.load(mixed_ptr + 2 * H * K + n * V + value, value < V, 0.0).to(tl.float32)
    projected_ptr += row * Y + X
    beta = tl.load(projected_ptr + N * V + n).to(tl.float32)
    beta = rounded(1.0 / (1.0 + tl.exp(-beta)), dtype)
    time = tl.load(projected_ptr + N * V + N + n).to(tl.float32)
    time += tl.load(decay_bias_ptr + n).to(tl.float32)
    time = tl.where(time > 20.0, time, tl.log(1.0 + tl.exp(tl.minimum(time, 20.0))))
    decay = -tl.exp(tl.load(log_rate_ptr + n).to(tl.float32)) * time

    S *= tl.exp(decay)
    u = (v - tl.sum(S * k[:, None], axis=0)) * beta
    S += k[:, None] * u[None, :]
    out = rounded(tl.sum(S * q[:, None], axis=0), dtype)
    tl.store(matrices_ptr + state * N * K * V + place, S, inside)
    if tl.load(num_tokens_ptr + slot) % PAGE == 0:
        mark = tl.load(mark_ptr + slot).to(tl.int64)
        tl.store(matrices_ptr + mark * N * K * V + place, S, inside)
    gate = tl.load(projected_ptr + n * V + value, value < V, 0.0).to(tl.float32)
    gated = _gated_norm(out, gate, norm_ptr, value, eps, V, dtype)
    tl.store(out_ptr + row * N * V + n * V + value, gated.to(dtype), value < V)


@triton.jit
def _gated_norm(out, gate, norm_ptr, value, eps, V: tl.constexpr, dtype: tl.constexpr):
    weight = tl.load(norm_ptr + value, value < V, 0.0).to(tl.float32)
    normed = rounded(out * tl.rsqrt(tl.sum(out * out) / V + eps), dtype)
    return rounded(weight * normed, dtype) * gate / (1.0 + tl.exp(-gate))


def gated_norm(out_TNV: torch.Tensor, gate_TX: torch.Tensor, norm: Norm) -> torch.Tensor:
    """[T, N * V]; rows of `gate_TX` may be apart."""
    num_rows, heads, dim = out_TNV.shape
    gated_TX = out_TNV.new_empty(num_rows, heads * dim)
    _gated_norm_kernel[(num_rows, heads)](
        out_TNV, gate_TX, norm.weight, gated_TX, gate_TX.stride(0), norm.eps,
        N=heads, V=dim, BV=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
    return gated_TX


@triton.jit
def _gated_norm_kernel(
    x_ptr, gate_ptr, norm_ptr, out_ptr, stride, eps,
    N: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    value = tl.arange(0, BV)
    place = (row * N + n) * V + value
    x = tl.load(x_ptr + place, value < V, 0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride + n * V + value, value < V, 0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gated = _gated_norm(x, gate, norm_ptr, value, eps, V, dtype)
    tl.store(out_ptr + place, gated.to(dtype), value < V)


def add_shared(
    x_TD: torch.Tensor, gate_1D: torch.Tensor, shared_TD: torch.Tensor, out_TCD: torch.Tensor
) -> None:
    """out[:, 0] += sigmoid(x gate') * shared: what a token's choices are summed to has it, too."""
    num_rows, num_choices, dim = out_TCD.shape
    block = int(triton.next_power_of_2(dim))
    _add_shared_kernel[(num_rows,)](
        x_TD, gate_1D, shared_TD, out_TCD, dim,
        CHOICES=num_choices,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **overlapping(OVERLAP),
    )  # fmt: skip


@triton.jit
def _add_shared_kernel(
    x_ptr, gate_ptr, shared_ptr, out_ptr, D,
    CHOICES: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK)
    inside = column < D
    weight = tl.load(gate_ptr + column, inside, 0.0).to(tl.float32)
    await_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * D + column, inside, 0.0).to(tl.float32)
    share = rounded(tl.sigmoid(tl.sum(x * weight)), dtype)
    shared = tl.load(shared_ptr + row * D + column, inside, 0.0).to(tl.float32)
    shared = rounded(shared * share, dtype)
    place = row * CHOICES * D + column
    out = tl.load(out_ptr + place, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + place, (out + shared).to(dtype), inside)
