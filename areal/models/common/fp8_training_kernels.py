"""Quantized factors of training in FP8, each in one pass over what is quantized (fp8_products.py).

Every kernel works on tiles of 128 x 128.

Shapes: T tokens, P of them with padding, a multiple of 128; D and F features, G groups of 128
features; N rows of a weight.
"""

# Launch options (num_warps) are none of a kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from areal.models.common.fp8 import FP8, GROUP
from areal.models.common.fp8_kernels import power_of_two_scale


def quantize(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, dim = x_TD.shape
    rows = new_rows(num_tokens, dim, x_TD.device)
    _quantize_kernel[_tiles(num_tokens, dim)](
        x_TD, *rows, num_tokens, len(rows[0]), dim,
        GROUP=GROUP,
        num_warps=8,
    )  # fmt: skip
    return rows


def quantize_gated(gate_TF: torch.Tensor, up_TF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, dim = gate_TF.shape
    rows = new_rows(num_tokens, dim, gate_TF.device)
    _gate_kernel[_tiles(num_tokens, dim)](
        gate_TF, up_TF, *rows, num_tokens, len(rows[0]), dim,
        GROUP=GROUP,
        num_warps=8,
    )  # fmt: skip
    return rows


def quantize_gate_grads(
    grad_TF: torch.Tensor, gate_TF: torch.Tensor, up_TF: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    num_tokens, dim = gate_TF.shape
    of_gate = new_rows(num_tokens, dim, gate_TF.device)
    of_up = new_rows(num_tokens, dim, gate_TF.device)
    _gate_grad_kernel[_tiles(num_tokens, dim)](
        grad_TF, gate_TF, up_TF, *of_gate, *of_up, num_tokens, len(of_up[0]), dim,
        GROUP=GROUP,
        num_warps=16,
    )  # fmt: skip
    return *of_gate, *of_up


def transpose(q_PD: torch.Tensor, scale_GP: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    padded, dim = q_PD.shape
    q_DP = q_PD.new_empty(dim, padded)
    _transpose_kernel[_tiles(padded, dim)](
        q_PD, scale_GP, top, q_DP, padded, dim,
        GROUP=GROUP,
        num_warps=8,
    )  # fmt: skip
    return q_DP


def quantize_weight(
    weight_ND: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, *, transposed: bool
) -> None:
    num_rows, dim = weight_ND.shape
    _weight_kernel[_tiles(num_rows, dim)](
        weight_ND, q, scale, num_rows, dim, scale.shape[1],
        TRANSPOSED=transposed,
        GROUP=GROUP,
        num_warps=8,
    )  # fmt: skip


def new_rows(num_tokens: int, dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for FP8 [P, D] and its scales [G, P]."""
    padded = -(-num_tokens // GROUP) * GROUP
    q_PD = torch.empty(padded, dim, dtype=FP8, device=device)
    return q_PD, torch.empty(-(-dim // GROUP), padded, dtype=torch.float32, device=device)


def _tiles(num_rows: int, dim: int) -> tuple[int, int]:
    return -(-num_rows // GROUP), -(-dim // GROUP)


@triton.jit
def _load(x_ptr, i, j, T, D, GROUP: tl.constexpr):
    """A tile in float32. What is infinite becomes NaN, as a conversion to FP8 would make it 448."""
    row, column = i * GROUP + tl.arange(0, GROUP), j * GROUP + tl.arange(0, GROUP)
    inside = (row < T)[:, None] & (column < D)[None, :]
    x = tl.load(x_ptr + row[:, None].to(tl.int64) * D + column[None, :], inside, 0.0).to(tl.float32)
    return tl.where(tl.abs(x) < float("inf"), x, float("nan"))


@triton.jit
def _store_rows(x, q_ptr, scale_ptr, i, j, P, D, GROUP: tl.constexpr):
    """Scales along the columns of each row."""
    row, column = i * GROUP + tl.arange(0, GROUP), j * GROUP + tl.arange(0, GROUP)
    scale = power_of_two_scale(tl.max(tl.abs(x), axis=1))
    tl.store(scale_ptr + j.to(tl.int64) * P + row, scale)
    q = (x * (1.0 / scale)[:, None]).to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + row[:, None].to(tl.int64) * D + column[None, :], q, (column < D)[None, :])


@triton.jit
def _quantize_kernel(x_ptr, q_ptr, scale_ptr, T, P, D, GROUP: tl.constexpr):
    i, j = tl.program_id(0), tl.program_id(1)
    x = _load(x_ptr, i, j, T, D, GROUP)
    _store_rows(x, q_ptr, scale_ptr, i, j, P, D, GROUP)


@triton.jit
def _gate_kernel(gate_ptr, up_ptr, q_ptr, scale_ptr, T, P, F, GROUP: tl.constexpr):
    i, j = tl.program_id(0), tl.program_id(1)
    gate = _load(gate_ptr, i, j, T, F, GROUP)
    x = gate * tl.sigmoid(gate) * _load(up_ptr, i, j, T, F, GROUP)
    _store_rows(x, q_ptr, scale_ptr, i, j, P, F, GROUP)


@triton.jit
def _gate_grad_kernel(
    grad_ptr, gate_ptr, up_ptr, gate_q, gate_scale, up_q, up_scale, T, P, F, GROUP: tl.constexpr
):
    i, j = tl.program_id(0), tl.program_id(1)
    gate = _load(gate_ptr, i, j, T, F, GROUP)
    grad = _load(grad_ptr, i, j, T, F, GROUP)
    sigmoid = tl.sigmoid(gate)
    _store_rows(grad * gate * sigmoid, up_q, up_scale, i, j, P, F, GROUP)
    grad *= _load(up_ptr, i, j, T, F, GROUP) * sigmoid
    _store_rows(grad * (1.0 + gate * (1.0 - sigmoid)), gate_q, gate_scale, i, j, P, F, GROUP)


@triton.jit
def _transpose_kernel(q_ptr, scale_ptr, top_ptr, qt_ptr, P, D, GROUP: tl.constexpr):
    """With the scale `top` for every number: a change of exponents, exact but for the smallest."""
    i, j = tl.program_id(0), tl.program_id(1)
    row, column = i * GROUP + tl.arange(0, GROUP), j * GROUP + tl.arange(0, GROUP)
    inside = (column < D)[None, :]
    q = tl.load(q_ptr + row[:, None].to(tl.int64) * D + column[None, :], inside, 0.0)
    factor = tl.load(scale_ptr + j.to(tl.int64) * P + row) / tl.load(top_ptr)
    q = tl.trans((q.to(tl.float32) * factor[:, None]).to(qt_ptr.dtype.element_ty))
    place = column[:, None].to(tl.int64) * P + row[None, :]
    tl.store(qt_ptr + place, q, (column < D)[:, None])


@triton.jit
def _weight_kernel(
    w_ptr, q_ptr, scale_ptr, N, D, scale_stride, TRANSPOSED: tl.constexpr, GROUP: tl.constexpr
):
    """One scale a tile; of the transposed weight the tile's place is transposed too."""
    i, j = tl.program_id(0), tl.program_id(1)
    row, column = i * GROUP + tl.arange(0, GROUP), j * GROUP + tl.arange(0, GROUP)
    w = _load(w_ptr, i, j, N, D, GROUP)
    scale = power_of_two_scale(tl.max(tl.abs(w)))
    q = (w * (1.0 / scale)).to(q_ptr.dtype.element_ty)
    inside = (row < N)[:, None] & (column < D)[None, :]
    if TRANSPOSED:
        tl.store(scale_ptr + j * scale_stride + i, scale)
        place = column[:, None].to(tl.int64) * N + row[None, :]
        tl.store(q_ptr + place, tl.trans(q), tl.trans(inside))
    else:
        tl.store(scale_ptr + i * scale_stride + j, scale)
        tl.store(q_ptr + row[:, None].to(tl.int64) * D + column[None, :], q, inside)
