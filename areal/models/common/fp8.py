"""Numbers in FP8: values, and scales that lose nothing.

A stored number is an e4m3 value; its scale is shared by 128 columns of one row (activations), by a
block of up to 128 rows and 128 columns (weights), or by one head of one token (`round_heads`, keys
and values). Scales are powers of two, so every dequantized number is exact in bfloat16 and in
float32.

Shapes: N rows, D columns, G = ceil(D / 128) groups of columns, B blocks of rows; T tokens, K heads,
H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F

FP8 = torch.float8_e4m3fn
GROUP = 128  # columns that share a scale
# The largest e4m3 value is 448 = 1.75 * 2**8: a float32 whose mantissa is larger than 1.75 carries
# into the next exponent when this is added to its bits.
CARRY = 0x1FFFFF
# Of a largest value below 2**-60 or of zeros only, so that no scale and no inverse is subnormal.
MIN_EXPONENT = 67


def dequantize(q_ND: torch.Tensor, scale_BG: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    num_rows, dim = q_ND.shape
    scale_NG = scale_BG.repeat_interleave(num_rows // len(scale_BG), 0)
    scale_ND = scale_NG.repeat_interleave(GROUP, 1)[:, :dim]
    return (q_ND.to(torch.float32) * scale_ND).to(dtype)


def round_heads(x_TKH: torch.Tensor) -> torch.Tensor:
    """What FP8 leaves of keys or values, with a scale for each head."""
    return rounded(x_TKH, _round_heads)


def _round_heads(x_TKH: torch.Tensor) -> torch.Tensor:
    scale_TK1 = scale_for(x_TKH.abs().amax(-1, keepdim=True).float())
    return ((x_TKH / scale_TK1).to(FP8).float() * scale_TK1).to(x_TKH.dtype)


def rounded(x: torch.Tensor, rounding: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`rounding(x)`, whose gradient is taken as that of x."""
    return cast(torch.Tensor, _Rounded.apply(x, rounding))


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rounding):
        return rounding(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def scale_for(largest: torch.Tensor) -> torch.Tensor:
    """The smallest power of two by which `largest` (float32) is at most 448."""
    exponent = (largest.view(torch.int32) + CARRY >> 23).clamp(min=MIN_EXPONENT)
    return (exponent - 8 << 23).view(torch.float32)


def quantize_blocks(x_ND: torch.Tensor, block_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 [N, D] and scales [B, G], in plain torch; N is a multiple of `block_rows`."""
    num_rows, dim = x_ND.shape
    num_groups = -(-dim // GROUP)
    x_ND = F.pad(x_ND.float(), (0, num_groups * GROUP - dim))
    x_BRGC = x_ND.view(num_rows // block_rows, block_rows, num_groups, GROUP)
    scale_BG = scale_for(x_BRGC.abs().amax((1, 3)))
    q_BRGC = (x_BRGC / scale_BG[:, None, :, None]).to(FP8)
    return q_BRGC.view(num_rows, num_groups * GROUP)[:, :dim].contiguous(), scale_BG
