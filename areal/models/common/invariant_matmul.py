"""Batch-invariant matrix product y = x w^T + b: one summation order for any number of rows.

Tiles are chosen by the weight's shape alone, and each output element is one chain of tensor-core
products over K, so a row of y is a function of that row of x. The cost: tiles that are optimal
neither for a single row nor for ten thousand.

Shapes: M rows, N outputs, K inputs.
"""

# Launch options (num_warps, num_stages) are none of a kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 64
_DEPTH = 64
# Narrow weights get narrow tiles: [1536, 1536] would otherwise occupy a tenth of the device.
_NARROW, _NARROW_TILE, _WIDE_TILE = 4096, 32, 128


def invariant_matmul(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    (num_rows, depth), num_out = x_MK.shape, len(weight_NK)
    x_MK = x_MK.contiguous()
    out_MN = torch.empty(num_rows, num_out, dtype=out_dtype or x_MK.dtype, device=x_MK.device)
    tile = _NARROW_TILE if num_out <= _NARROW else _WIDE_TILE
    grid = (triton.cdiv(num_rows, _ROWS), triton.cdiv(num_out, tile))
    _matmul_kernel[grid](
        x_MK, weight_NK, bias_N, out_MN, num_rows, num_out, depth, weight_NK.stride(0),
        ROWS=_ROWS, TILE=tile, DEPTH=_DEPTH, BIAS=bias_N is not None, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out_MN


@triton.jit
def _matmul_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, M, N, K, weight_stride,
    ROWS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    k = tl.arange(0, DEPTH)
    in_row, in_column = row < M, column < N
    x_place = x_ptr + row[:, None].to(tl.int64) * K + k[None, :]
    weight_place = weight_ptr + column[None, :].to(tl.int64) * weight_stride + k[:, None]
    acc = tl.zeros((ROWS, TILE), tl.float32)
    for start in range(0, K, DEPTH):
        in_depth = start + k < K
        x = tl.load(x_place, in_row[:, None] & in_depth[None, :], 0.0)
        weight = tl.load(weight_place, in_column[None, :] & in_depth[:, None], 0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
        x_place += DEPTH
        weight_place += DEPTH
    if BIAS:
        acc += tl.load(bias_ptr + column, in_column, 0.0).to(tl.float32)[None, :]
    out_place = out_ptr + row[:, None].to(tl.int64) * N + column[None, :]
    tl.store(out_place, acc.to(out_ptr.dtype.element_ty), in_row[:, None] & in_column[None, :])
