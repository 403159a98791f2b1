"""Quantized factors of training in FP8, each in one pass over what is quantized (fp8_products.py).

Every kernel works on tiles of 128 x 128, which hold whole groups of both directions.

Shapes: T tokens, P of them with padding, a multiple of 128; D and F features, G and H groups of 128
features and of 128 tokens; N rows of a weight.
"""

# Launch options (num_warps) are none of a kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from areal.models.common.fp8 import FP8, GROUP
from areal.models.common.fp8_kernels import power_of_two_scale


def quantize(x_TD: torch.Tensor, *, both: bool) -> tuple[torch.Tensor, ...]:
    """Rows, and with `both` columns too: as fp8_products.quantize."""
    num_tokens, dim = x_TD.shape
    rows = new_rows(num_tokens, dim, x_TD.device)
    columns = new_columns(num_tokens if both else 0, dim, x_TD.device)
    _quantize_kernel[_tiles(num_tokens, dim)](
        x_TD, *rows, *columns, num_tokens, rows[1].shape[1], dim,
        BOTH=both,
        GROUP=GROUP,
        num_warps=8,
    )  # fmt: skip
    return *rows, *columns


def quantize_gated(gate_TF: torch.Tensor, up_TF: torch.Tensor) -> tuple[torch.Tensor, ...]:
    num_tokens, dim = gate_TF.shape
    rows = new_rows(num_tokens, dim, gate_TF.device)
    _gate_kernel[_tiles(num_tokens, dim)](
        gate_TF, up_TF, *rows, num_tokens, rows[1].shape[1], dim,
        GROUP=GROUP,
        num_warps=8,
    )  # fmt: skip
    return rows


def quantize_gate_grads(
    grad_TF: torch.Tensor, gate_TF: torch.Tensor, up_TF: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    (num_tokens, dim), device = gate_TF.shape, gate_TF.device
    rows = [new_rows(num_tokens, dim, device) for _ in range(2)]
    columns = [new_columns(num_tokens, dim, device) for _ in range(3)]
    made = (*rows[0], *columns[0], *rows[1], *columns[1], *columns[2])
    tiles, groups = _tiles(num_tokens, dim)
    _gate_grad_kernel[(2 * tiles, groups)](
        grad_TF, gate_TF, up_TF, *made, num_tokens, rows[0][1].shape[1], dim,
        GROUP=GROUP,
        num_warps=16,
    )  # fmt: skip
    return made


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


def new_columns(
    num_tokens: int, dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for FP8 [D, P] and its scales [H, D]."""
    groups = -(-num_tokens // GROUP)
    q_DP = torch.empty(dim, groups * GROUP, dtype=FP8, device=device)
    return q_DP, torch.empty(groups, dim, dtype=torch.float32, device=device)


def _tiles(num_rows: int, dim: int) -> tuple[int, int]:
    return triton.cdiv(num_rows, GROUP), triton.cdiv(dim, GROUP)


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
def _store_columns(x, q_ptr, scale_ptr, i, j, P, D, GROUP: tl.constexpr):
    """Transposed, with scales along the rows of each column."""
    row, column = i * GROUP + tl.arange(0, GROUP), j * GROUP + tl.arange(0, GROUP)
    scale = power_of_two_scale(tl.max(tl.abs(x), axis=0))
    tl.store(scale_ptr + i.to(tl.int64) * D + column, scale, column < D)
    q = tl.trans((x * (1.0 / scale)[None, :]).to(q_ptr.dtype.element_ty))
    tl.store(q_ptr + column[:, None].to(tl.int64) * P + row[None, :], q, (column < D)[:, None])


@triton.jit
def _quantize_kernel(
    x_ptr, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, T, P, D,
    BOTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    i, j = tl.program_id(0), tl.program_id(1)
    x = _load(x_ptr, i, j, T, D, GROUP)
    _store_rows(x, q_ptr, scale_ptr, i, j, P, D, GROUP)
    if BOTH:
        _store_columns(x, qt_ptr, scale_t_ptr, i, j, P, D, GROUP)


@triton.jit
def _gate_kernel(gate_ptr, up_ptr, q_ptr, scale_ptr, T, P, F, GROUP: tl.constexpr):
    i, j = tl.program_id(0), tl.program_id(1)
    gate = _load(gate_ptr, i, j, T, F, GROUP)
    x = gate * tl.sigmoid(gate) * _load(up_ptr, i, j, T, F, GROUP)
    _store_rows(x, q_ptr, scale_ptr, i, j, P, F, GROUP)


@triton.jit
def _gate_grad_kernel(
    grad_ptr, gate_ptr, up_ptr,
    gate_q, gate_scale, gate_qt, gate_scale_t,
    up_q, up_scale, up_qt, up_scale_t,
    x_qt, x_scale_t, T, P, F, GROUP: tl.constexpr,
):  # fmt: skip
    """Two programs a tile, neighbours in time: the results of both do not fit the registers."""
    i, j = tl.program_id(0) // 2, tl.program_id(1)
    gate = _load(gate_ptr, i, j, T, F, GROUP)
    grad = _load(grad_ptr, i, j, T, F, GROUP)
    up = _load(up_ptr, i, j, T, F, GROUP)
    sigmoid = tl.sigmoid(gate)
    if tl.program_id(0) % 2 == 0:
        gate_grad = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        _store_rows(gate_grad, gate_q, gate_scale, i, j, P, F, GROUP)
        _store_columns(gate_grad, gate_qt, gate_scale_t, i, j, P, F, GROUP)
    else:
        silu = gate * sigmoid
        _store_columns(silu * up, x_qt, x_scale_t, i, j, P, F, GROUP)
        up_grad = grad * silu
        _store_rows(up_grad, up_q, up_scale, i, j, P, F, GROUP)
        _store_columns(up_grad, up_qt, up_scale_t, i, j, P, F, GROUP)


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
