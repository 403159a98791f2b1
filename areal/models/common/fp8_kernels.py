"""FP8 values and scales of a matrix in one pass (fp8.py says what they are).

Shapes: N rows, D columns, G = ceil(D / 128) groups of columns, B blocks of rows.
"""

# Launch options (num_warps) are none of a kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from areal.models.common.fp8 import CARRY, FP8, GROUP, MIN_EXPONENT

_CARRY, _MIN_EXPONENT = tl.constexpr(CARRY), tl.constexpr(MIN_EXPONENT)


def new_rows(num_rows: int, dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for quantized rows: FP8 [N, D], and scales [N, G] with the rows adjacent in memory, as
    products on tensor cores read them. More than 64 rows have room for whole multiples of 16."""
    room = num_rows if num_rows <= 64 else -(-num_rows // 16) * 16
    q_ND = torch.empty(room, dim, dtype=FP8, device=device)
    scale_GN = torch.empty(-(-dim // GROUP), room, dtype=torch.float32, device=device)
    return q_ND[:num_rows], scale_GN.t()[:num_rows]


def quantize_into(x_ND: torch.Tensor, q_ND: torch.Tensor, scale_BG: torch.Tensor) -> None:
    """Of contiguous rows, a multiple of the blocks'."""
    num_rows, dim = x_ND.shape
    block_rows = num_rows // len(scale_BG)
    rows = max(block_rows, 8)
    _quantize_kernel[(triton.cdiv(num_rows, rows), scale_BG.shape[1])](
        x_ND, q_ND, scale_BG, num_rows, dim, *scale_BG.stride(),
        ROWS=rows,
        BLOCK_ROWS=block_rows,
        GROUP=GROUP,
        num_warps=max(1, rows // 16),
    )  # fmt: skip


@triton.jit
def power_of_two_scale(largest):
    """As fp8.scale_for."""
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) + _CARRY) >> 23, _MIN_EXPONENT)
    return ((exponent - 8) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _quantize_kernel(
    x_ptr, q_ptr, scale_ptr, N, D, block_stride, group_stride,
    ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    inside = (row < N)[:, None] & (column < D)[None, :]
    place = row[:, None].to(tl.int64) * D + column[None, :]
    x = tl.load(x_ptr + place, inside, 0.0).to(tl.float32)
    BLOCKS: tl.constexpr = ROWS // BLOCK_ROWS
    largest = tl.max(tl.reshape(tl.max(tl.abs(x), axis=1), [BLOCKS, BLOCK_ROWS]), axis=1)
    scale = power_of_two_scale(largest)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    scale_place = block.to(tl.int64) * block_stride + tl.program_id(1) * group_stride
    tl.store(scale_ptr + scale_place, scale, block * BLOCK_ROWS < N)
    by_row = tl.reshape(tl.broadcast_to((1.0 / scale)[:, None], [BLOCKS, BLOCK_ROWS]), [ROWS])
    tl.store(q_ptr + place, (x * by_row[:, None]).to(q_ptr.dtype.element_ty), inside)
