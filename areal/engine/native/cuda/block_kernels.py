"""The parts of a decoder block between its matrix products, each one pass over its data.

They compute the operations of `areal.models.common` in float32 and round to the model's dtype in
the same places, so that decoding and training differ only in summation order.

Shape legend: T rows, D model dim, F feed-forward dim, N query heads, K key/value heads, H head dim,
R = H / 2 rotated pairs, X = (N + 2 K) * H.
"""

# Launch options (num_warps, num_stages) are none of a kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from areal.engine.native.cuda.device import OVERLAP, await_previous, overlapping
from areal.engine.native.cuda.fp8_tensors import CacheScales, Fp8Rows
from areal.models.common.fp8 import GROUP
from areal.models.common.fp8_kernels import power_of_two_scale

_HEADS_PER_PROGRAM = 8
_GATE_BLOCK = 2048
_SOFTCAP_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: x / rms(x) * (weight + offset)."""

    weight: torch.Tensor
    eps: float
    offset: float = 0.0


def rms_norm(x_TD: torch.Tensor, norm: Norm, out_TD: torch.Tensor | Fp8Rows) -> None:
    """`out` may be `x`, whose rows may have gaps between them; an FP8 `out` is quantized from the
    rounded norm."""
    _norm(x_TD, None, None, norm, out_TD)


def add_rms_norm(
    x: torch.Tensor,
    residual_TD: torch.Tensor,
    norm: Norm,
    out_TD: torch.Tensor | Fp8Rows,
    x_norm: Norm | None = None,
) -> None:
    """residual += x (or its `x_norm`) in place, rounded to its dtype; out = norm of that.

    `x` is [T, D], or [T, C, D]: the outputs of C experts, summed in their order and rounded.
    `out` may be `x`.
    """
    _norm(x, x_norm, residual_TD, norm, out_TD)


def _norm(x, x_norm, residual_TD, norm, out_TD) -> None:
    num_rows, dim = len(x), x.shape[-1]
    scale_TG = None
    if isinstance(out_TD, Fp8Rows):
        out_TD, scale_TG = out_TD.q_MD, out_TD.scale_MG
    block = max(triton.next_power_of_2(dim), GROUP)
    assert x_norm is None or (x_norm.eps, x_norm.offset) == (norm.eps, norm.offset)
    _rms_norm_kernel[(num_rows,)](
        x, x_norm and x_norm.weight, residual_TD, norm.weight, out_TD, scale_TG,
        dim, x.stride(0), norm.eps, 0 if scale_TG is None else scale_TG.stride(1),
        BLOCK=block,
        GROUP=GROUP,
        CHOICES=x.shape[1] if x.dim() == 3 else 1,
        OFFSET=norm.offset,
        X_NORM=x_norm is not None,
        ADD=residual_TD is not None,
        num_warps=min(max(block // 512, 1), 16),  # 16 elements per thread
        **overlapping(OVERLAP),
    )  # fmt: skip


@triton.jit
def _rms_norm_kernel(
    x_ptr, x_weight_ptr, residual_ptr, weight_ptr, out_ptr, scale_ptr, D, x_stride, eps,
    scale_stride,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, CHOICES: tl.constexpr, OFFSET: tl.constexpr,
    X_NORM: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < D
    weight = load_norm(weight_ptr + column, inside, OFFSET)
    if X_NORM:
        x_weight = load_norm(x_weight_ptr + column, inside, OFFSET)
    await_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    place = row * D + column
    x_ptr += row * x_stride + column
    x = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        x += tl.load(x_ptr + choice * D, inside, 0.0).to(tl.float32)
    x = rounded(x, x_ptr.dtype.element_ty)
    if X_NORM:
        x = x * tl.rsqrt(tl.sum(x * x) / D + eps) * x_weight
        x = rounded(x, x_ptr.dtype.element_ty)
    if ADD:
        x += tl.load(residual_ptr + place, inside, 0.0).to(tl.float32)
        total = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + place, total, inside)
        x = total.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x) / D + eps) * weight
    if scale_ptr is not None:
        x = rounded(x, x_ptr.dtype.element_ty)
        x = _quantized(x, scale_ptr, scale_stride, row, 0, D, BLOCK, GROUP)
    tl.store(out_ptr + place, x.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def _quantized(
    x, scale_ptr, scale_stride, row, block, width, BLOCK: tl.constexpr, GROUP: tl.constexpr
):
    """Block `block` of a row over the scales of its groups, which are written."""
    GROUPS: tl.constexpr = BLOCK // GROUP
    x = tl.reshape(x, [GROUPS, GROUP])
    scale = power_of_two_scale(tl.max(tl.abs(x), axis=1))
    x = tl.reshape(x * (1.0 / scale)[:, None], [BLOCK])  # exact: powers of two
    group = block * GROUPS + tl.arange(0, GROUPS)
    tl.store(scale_ptr + group * scale_stride + row, scale, group * GROUP < width)
    return x


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x as `dtype` holds it, float32."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def load_norm(pointers, inside, OFFSET: tl.constexpr):
    """The factors of a norm, float32."""
    weight = tl.load(pointers, inside, 0.0).to(tl.float32)
    if OFFSET != 0.0:
        weight += OFFSET
    return weight


# A name of moe.ACTIVATIONS, as `activate` computes it.
ACTIVATIONS = ("silu", "gelu_tanh")


@triton.jit
def activate(x, NAME: tl.constexpr):
    """x times the sigmoid of x, or of the cubic whose tanh approximates gelu."""
    slope = x
    if NAME == "gelu_tanh":
        slope = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # sqrt(8 / pi)
    return x / (1.0 + tl.exp(-slope))


@triton.jit
def gate(x, up, dtype: tl.constexpr, NAME: tl.constexpr):
    """activation(x) * up in float32, rounded where the separate layers round."""
    return rounded(activate(rounded(x, dtype), NAME), dtype) * rounded(up, dtype)


def gate_mul(gate_up_T2F: torch.Tensor, activation: str, out_TF: torch.Tensor) -> None:
    """The activation of the first F columns times the others."""
    _gate_mul(gate_up_T2F, activation, out_TF, None)


def gate_mul_fp8(gate_up_T2F: torch.Tensor, activation: str) -> Fp8Rows:
    """`gate_mul`, rounded as there, then quantized."""
    num_rows, width = gate_up_T2F.shape
    out = Fp8Rows.empty(num_rows, width // 2, gate_up_T2F.device)
    _gate_mul(gate_up_T2F, activation, out.q_MD, out.scale_MG)
    return out


def _gate_mul(gate_up_T2F, activation, out_TF, scale_TG) -> None:
    num_rows, width = out_TF.shape
    _gate_mul_kernel[(num_rows, triton.cdiv(width, _GATE_BLOCK))](
        gate_up_T2F, out_TF, scale_TG, width, 0 if scale_TG is None else scale_TG.stride(1),
        ACTIVATION=activation,
        BLOCK=_GATE_BLOCK,
        GROUP=GROUP,
        num_warps=4,
        **overlapping(OVERLAP),
    )  # fmt: skip


@triton.jit
def _gate_mul_kernel(
    gate_up_ptr, out_ptr, scale_ptr, F, scale_stride,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    await_previous(OVERLAP)
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    x = tl.load(gate_up_ptr + row * 2 * F + column, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * F + F + column, inside, 0.0).to(tl.float32)
    y = gate(x, up, dtype, ACTIVATION)
    if scale_ptr is not None:
        y = rounded(y, dtype)
        y = _quantized(y, scale_ptr, scale_stride, row, tl.program_id(1), F, BLOCK, GROUP)
    tl.store(out_ptr + row * F + column, y.to(out_ptr.dtype.element_ty), inside)


def quantized(x_TD: torch.Tensor) -> Fp8Rows:
    """Contiguous rows in FP8."""
    num_rows, dim = x_TD.shape
    out = Fp8Rows.like(x_TD)
    _quantize_kernel[(num_rows, triton.cdiv(dim, _GATE_BLOCK))](
        x_TD, out.q_MD, out.scale_MG, dim, out.scale_MG.stride(1),
        BLOCK=_GATE_BLOCK,
        GROUP=GROUP,
        num_warps=4,
        **overlapping(OVERLAP),
    )  # fmt: skip
    return out


@triton.jit
def _quantize_kernel(
    x_ptr, out_ptr, scale_ptr, D, scale_stride,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    await_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * D + column, column < D, 0.0).to(tl.float32)
    q = _quantized(x, scale_ptr, scale_stride, row, tl.program_id(1), D, BLOCK, GROUP)
    tl.store(out_ptr + row * D + column, q.to(out_ptr.dtype.element_ty), column < D)


def softcap_(logits_TV: torch.Tensor, cap: float) -> None:
    """cap * tanh(logits / cap), in place, of contiguous rows."""
    num_rows, width = logits_TV.shape
    _softcap_kernel[(num_rows, triton.cdiv(width, _SOFTCAP_BLOCK))](
        logits_TV, width, cap, BLOCK=_SOFTCAP_BLOCK, num_warps=8
    )


@triton.jit
def _softcap_kernel(logits_ptr, V, cap, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits_ptr + tl.program_id(0).to(tl.int64) * V + column
    x = tl.load(place, column < V, 0.0)
    # tanh(y) = 1 - 2 / (1 + exp(2 y)), which is finite wherever y is.
    tl.store(place, cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * x / cap))), column < V)


def rope_and_cache(
    qkv_TX: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    write_T: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_out_TNH: torch.Tensor,
    q_norm: Norm | None,
    k_norm: Norm | None,
    scales: CacheScales | None = None,
) -> None:
    """Norm the heads of q and k (if the model does), rotate them; write k and v to the cache.

    `keys` and `values` are `[num_pages, K, page_size, H]`; row t goes to the flat position
    `write_T[t]` = page * page_size + offset. Rows of one position overwrite each other. `scales`:
    of a cache in FP8.
    """
    num_rows, num_heads, head_dim = q_out_TNH.shape
    _, num_kv_heads, page_size, _ = keys.shape
    all_heads, block = num_heads + 2 * num_kv_heads, triton.next_power_of_2(head_dim // 2)
    if q_norm is not None and k_norm is not None:
        assert (q_norm.eps, q_norm.offset) == (k_norm.eps, k_norm.offset)
    _rope_kernel[(num_rows, triton.cdiv(all_heads, _HEADS_PER_PROGRAM))](
        qkv_TX, cos_TR, sin_TR, write_T, keys, values, scales and scales.keys,
        scales and scales.values, q_out_TNH, q_norm and q_norm.weight, k_norm and k_norm.weight,
        q_norm.eps if q_norm else 0.0,
        N=num_heads,
        K=num_kv_heads,
        PAGE=page_size,
        R=head_dim // 2,
        HEADS=_HEADS_PER_PROGRAM,
        BLOCK=block,
        NORM=q_norm is not None,
        OFFSET=q_norm.offset if q_norm else 0.0,
        num_warps=max(2, _HEADS_PER_PROGRAM * block // 256),  # at most 8 pairs per thread
        **overlapping(OVERLAP),
    )  # fmt: skip


@triton.jit
def _rope_kernel(
    qkv_ptr, cos_ptr, sin_ptr, write_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
    q_ptr, q_norm_ptr, k_norm_ptr, eps,
    N: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr, R: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    await_previous(OVERLAP)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    in_pair = pair < R
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_q, is_k = head < N, (head >= N) & (head < N + K)
    is_v = (head >= N + K) & (head < N + 2 * K)
    loaded = (head < N + 2 * K)[:, None] & in_pair[None, :]

    source = qkv_ptr + row * (N + 2 * K) * 2 * R + head[:, None] * 2 * R + pair[None, :]
    first = tl.load(source, loaded, 0.0).to(tl.float32)
    second = tl.load(source + R, loaded, 0.0).to(tl.float32)
    v_first, v_second = first, second
    if NORM:
        squares = tl.sum(first * first + second * second, axis=1) / (2 * R)
        scale = tl.rsqrt(squares + eps)[:, None]
        q_first, q_second = _halves(q_norm_ptr, pair, R, OFFSET)
        k_first, k_second = _halves(k_norm_ptr, pair, R, OFFSET)
        norm_first = tl.where(is_q[:, None], q_first[None, :], k_first[None, :])
        norm_second = tl.where(is_q[:, None], q_second[None, :], k_second[None, :])
        first = rounded(first * scale * norm_first, dtype)
        second = rounded(second * scale * norm_second, dtype)

    # One copy per head, in its own threads: sharing a copy would need barriers.
    angle = row * R + pair[None, :] + tl.zeros([HEADS, 1], tl.int32)
    cos = tl.load(cos_ptr + angle, loaded, 0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, loaded, 0.0).to(tl.float32)
    turned_first = rounded(first * cos, dtype) - rounded(second * sin, dtype)
    turned_second = rounded(second * cos, dtype) + rounded(first * sin, dtype)

    to_q = q_ptr + (row * N + head[:, None]) * 2 * R + pair[None, :]
    q_mask = is_q[:, None] & in_pair[None, :]
    tl.store(to_q, turned_first.to(dtype), q_mask)
    tl.store(to_q + R, turned_second.to(dtype), q_mask)

    write = tl.load(write_ptr + row).to(tl.int64)
    kv_head = tl.where(head < N + K, head - N, head - N - K)[:, None]
    position = (write // PAGE * K + kv_head) * PAGE + write % PAGE
    turned_first, turned_second = rounded(turned_first, dtype), rounded(turned_second, dtype)
    if key_scales_ptr is not None:
        k_scale = _head_scale(turned_first, turned_second)
        v_scale = _head_scale(v_first, v_second)
        tl.store(key_scales_ptr + position, k_scale, is_k[:, None])
        tl.store(value_scales_ptr + position, v_scale, is_v[:, None])
        k_factor, v_factor = 1.0 / k_scale, 1.0 / v_scale  # exact: powers of two
        turned_first, turned_second = turned_first * k_factor, turned_second * k_factor
        v_first, v_second = v_first * v_factor, v_second * v_factor
    slot = position * 2 * R + pair[None, :]
    cached: tl.constexpr = keys_ptr.dtype.element_ty
    k_mask = is_k[:, None] & in_pair[None, :]
    tl.store(keys_ptr + slot, turned_first.to(cached), k_mask)
    tl.store(keys_ptr + slot + R, turned_second.to(cached), k_mask)
    v_mask = is_v[:, None] & in_pair[None, :]
    tl.store(values_ptr + slot, v_first.to(cached), v_mask)
    tl.store(values_ptr + slot + R, v_second.to(cached), v_mask)


@triton.jit
def _head_scale(first, second):
    """[heads, 1]"""
    largest = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
    return power_of_two_scale(largest)[:, None]


@triton.jit
def _halves(weight_ptr, pair, R: tl.constexpr, OFFSET: tl.constexpr):
    first = load_norm(weight_ptr + pair, pair < R, OFFSET)
    second = load_norm(weight_ptr + R + pair, pair < R, OFFSET)
    return first, second
