"""Quantized factors of training in FP8, each in one pass over what is quantized (fp8_products.py).

What has a scale for each row works on tiles of 16 x 128, which keeps enough of them in flight; the
others on 128 x 128.

Shapes: T tokens, P of them with padding, a multiple of 128; D and F features, G groups of 128
features; N rows of a weight.
"""

# Launch options (num_warps) are none of a kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from areal.models.common.fp8 import FP8, GROUP
from areal.models.common.fp8_kernels import power_of_two_scale

MAX_WEIGHTS = 3  # of one launch: what reads the same input in a block
_ROWS = 16  # of a tile whose rows have scales: of 8 to 128 the fastest on an H200


def quantize(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _in_rows(_quantize_kernel, [x_TD], x_TD.shape[1], x_TD.shape[1])


def quantize_gated(gate_up_T2F: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dim = gate_up_T2F.shape[1] // 2
    return _in_rows(_gate_kernel, [gate_up_T2F], dim, dim)


def quantize_gate_grads(
    grad_TF: torch.Tensor, gate_up_T2F: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dim = grad_TF.shape[1]
    assert dim % GROUP == 0, dim  # a group has features of the gate or of up
    return _in_rows(_gate_grad_kernel, [grad_TF, gate_up_T2F], dim, 2 * dim)


def _in_rows(
    kernel: triton.JITFunction, inputs: Sequence[torch.Tensor], dim: int, out_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `kernel` makes of `inputs`: `out_dim` features with scales for each row, by tiles of
    `dim` features."""
    num_tokens = len(inputs[0])
    rows = new_rows(num_tokens, out_dim, inputs[0].device)
    padded = len(rows[0])
    kernel[padded // _ROWS, -(-dim // GROUP)](
        *inputs, *rows, num_tokens, padded, dim,
        ROWS=_ROWS,
        GROUP=GROUP,
        num_warps=4,
    )  # fmt: skip
    return rows


def transpose(q_PD: torch.Tensor, scale_GP: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    padded, dim = q_PD.shape
    q_DP = q_PD.new_empty(dim, padded)
    _transpose_kernel[_tiles(padded, dim)](
        q_PD, scale_GP, top, q_DP, padded, dim,
        GROUP=GROUP,
        num_warps=8,
    )  # fmt: skip
    return q_DP


def quantize_weights(
    weights: Sequence[torch.Tensor], q: torch.Tensor, scale: torch.Tensor, *, transposed: bool
) -> None:
    """Up to MAX_WEIGHTS, all but the last with a multiple of 128 rows, in one launch."""
    rows = [len(weight) for weight in weights]
    absent = MAX_WEIGHTS - len(weights)
    _weight_kernel[_tiles(sum(rows), weights[0].shape[1])](
        *weights, *[weights[0]] * absent, *rows, *[0] * absent, q, scale,
        weights[0].shape[1], q.stride(0), *scale.shape,
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
def _load(x_ptr, i, j, T, D, stride, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """A tile in float32. What is infinite becomes NaN, as a conversion to FP8 would make it 448."""
    row, column = i * ROWS + tl.arange(0, ROWS), j * GROUP + tl.arange(0, GROUP)
    inside = (row < T)[:, None] & (column < D)[None, :]
    place = x_ptr + row[:, None].to(tl.int64) * stride + column[None, :]
    x = tl.load(place, inside, 0.0).to(tl.float32)
    return tl.where(tl.abs(x) < float("inf"), x, float("nan"))


@triton.jit
def _store_rows(x, q_ptr, scale_ptr, i, j, P, D, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Scales along the columns of each row."""
    row, column = i * ROWS + tl.arange(0, ROWS), j * GROUP + tl.arange(0, GROUP)
    scale = power_of_two_scale(tl.max(tl.abs(x), axis=1))
    tl.store(scale_ptr + j.to(tl.int64) * P + row, scale)
    q = (x * (1.0 / scale)[:, None]).to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + row[:, None].to(tl.int64) * D + column[None, :], q, (column < D)[None, :])


@triton.jit
def _quantize_kernel(x_ptr, q_ptr, scale_ptr, T, P, D, ROWS: tl.constexpr, GROUP: tl.constexpr):
    i, j = tl.program_id(0), tl.program_id(1)
    x = _load(x_ptr, i, j, T, D, D, ROWS, GROUP)
    _store_rows(x, q_ptr, scale_ptr, i, j, P, D, ROWS, GROUP)


@triton.jit
def _gate_kernel(gate_up_ptr, q_ptr, scale_ptr, T, P, F, ROWS: tl.constexpr, GROUP: tl.constexpr):
    i, j = tl.program_id(0), tl.program_id(1)
    gate = _load(gate_up_ptr, i, j, T, F, 2 * F, ROWS, GROUP)
    x = gate * tl.sigmoid(gate) * _load(gate_up_ptr + F, i, j, T, F, 2 * F, ROWS, GROUP)
    _store_rows(x, q_ptr, scale_ptr, i, j, P, F, ROWS, GROUP)


@triton.jit
def _gate_grad_kernel(
    grad_ptr, gate_up_ptr, q_ptr, scale_ptr, T, P, F, ROWS: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    i, j = tl.program_id(0), tl.program_id(1)
    gate = _load(gate_up_ptr, i, j, T, F, 2 * F, ROWS, GROUP)
    grad = _load(grad_ptr, i, j, T, F, F, ROWS, GROUP)
    sigmoid = tl.sigmoid(gate)
    of_up = j + F // GROUP
    _store_rows(grad * gate * sigmoid, q_ptr, scale_ptr, i, of_up, P, 2 * F, ROWS, GROUP)
    grad *= _load(gate_up_ptr + F, i, j, T, F, 2 * F, ROWS, GROUP) * sigmoid
    _store_rows(
        grad * (1.0 + gate * (1.0 - sigmoid)), q_ptr, scale_ptr, i, j, P, 2 * F, ROWS, GROUP
    )


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
    a_ptr, b_ptr, c_ptr, rows_a, rows_b, rows_c, q_ptr, scale_ptr, D, q_stride, blocks, groups,
    TRANSPOSED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One scale a tile; of the transposed weight the tile's place is transposed too. The scales
    past the last group are 0."""
    i, j = tl.program_id(0), tl.program_id(1)
    w_ptr, own, N = a_ptr, i, rows_a
    if i * GROUP >= rows_a:
        w_ptr, own, N = b_ptr, i - rows_a // GROUP, rows_b
    if i * GROUP >= rows_a + rows_b:
        w_ptr, own, N = c_ptr, i - (rows_a + rows_b) // GROUP, rows_c
    w = _load(w_ptr, own, j, N, D, D, GROUP, GROUP)
    scale = power_of_two_scale(tl.max(tl.abs(w)))
    q = (w * (1.0 / scale)).to(q_ptr.dtype.element_ty)
    row, column = i * GROUP + tl.arange(0, GROUP), j * GROUP + tl.arange(0, GROUP)
    inside = (own * GROUP + tl.arange(0, GROUP) < N)[:, None] & (column < D)[None, :]
    block, group, last = i, j, tl.num_programs(1) - 1
    if TRANSPOSED:
        block, group, last = j, i, tl.num_programs(0) - 1
        place = column[:, None].to(tl.int64) * q_stride + row[None, :]
        tl.store(q_ptr + place, tl.trans(q), tl.trans(inside))
    else:
        tl.store(q_ptr + row[:, None].to(tl.int64) * q_stride + column[None, :], q, inside)
    ahead = tl.arange(0, 4)
    written = (ahead == 0) | ((group == last) & (group + ahead < groups))
    tl.store(scale_ptr + block * groups + group + ahead, tl.where(ahead == 0, scale, 0.0), written)
