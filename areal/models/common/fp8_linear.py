"""Linear layers in FP8: weights in blocks, activations by rows (fp8.py).

    y = dequantize(quantize_rows(x)) @ dequantize(quantize_blocks(W))^T + b

Whoever multiplies (tensor cores in FP8, cuBLAS in bfloat16, a CPU) has the same factors and differs
in its sums only, so a trainer can compute what an FP8 server computes, also on a device without
FP8. Not bit for bit: a sum that differs in its last bits may round to another FP8 value in the next
layer, and Hopper's tensor cores add 128 FP8 products with about 14 bits.

Linear layers that read the same input lie side by side in an engine and share the height of their
blocks, the largest power of two up to 128 that divides the rows of each (`block_rows_of`).

Shapes: T rows, D and N features in and out, G = ceil(D / 128) groups of columns, B blocks of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from areal.models.common.fp8 import FP8, GROUP, dequantize, quantize_blocks, rounded

_MAX_BLOCK_ROWS = 128


def block_rows_of(num_rows: Sequence[int]) -> int:
    """Height of the blocks of weights with so many rows each, side by side."""
    rows = _MAX_BLOCK_ROWS
    while any(count % rows for count in num_rows):
        rows //= 2
    return rows


def quantize_rows(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 [T, D] and scales [T, G]."""
    if not x_TD.is_cuda:
        return quantize_blocks(x_TD, block_rows=1)
    from areal.models.common import fp8_kernels  # needs Triton

    num_rows, dim = x_TD.shape
    q_TD, scale_TG = fp8_kernels.new_rows(num_rows, dim, x_TD.device)
    fp8_kernels.quantize_into(x_TD.contiguous(), q_TD, scale_TG)
    return q_TD, scale_TG


def round_rows(x_TD: torch.Tensor) -> torch.Tensor:
    """What FP8 leaves of activations."""
    return dequantize(*quantize_rows(x_TD), x_TD.dtype)


def _scale_shape(weight_ND: torch.Tensor, block_rows: int) -> tuple[int, int]:
    num_rows, dim = weight_ND.shape
    return num_rows // block_rows, -(-dim // GROUP)


def _quantize_into(weight_ND: torch.Tensor, q_ND: torch.Tensor, scale_BG: torch.Tensor) -> None:
    if weight_ND.is_cuda:
        from areal.models.common import fp8_kernels  # needs Triton

        fp8_kernels.quantize_into(weight_ND.contiguous(), q_ND, scale_BG)
    else:
        made = quantize_blocks(weight_ND, len(weight_ND) // len(scale_BG))
        q_ND.copy_(made[0])
        scale_BG.copy_(made[1])


def round_weight(weight_ND: torch.Tensor, block_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """What FP8 leaves of a weight."""
    weight_ND = weight_ND.contiguous()  # else `empty_like` would have its strides
    q_ND = torch.empty_like(weight_ND, dtype=FP8)
    scale_BG = weight_ND.new_empty(_scale_shape(weight_ND, block_rows), dtype=torch.float32)
    _quantize_into(weight_ND, q_ND, scale_BG)
    return dequantize(q_ND, scale_BG, dtype)


class Fp8Linear(nn.Linear):
    """A linear layer whose weight is stored in FP8; `load` quantizes what it is given."""

    scale: torch.Tensor  # [B, G] float32

    def __init__(self, linear: nn.Linear, block_rows: int) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        device, (num_rows, dim) = linear.weight.device, linear.weight.shape
        self.weight = nn.Parameter(
            torch.empty(num_rows, dim, dtype=FP8, device=device), requires_grad=False
        )
        self.bias = linear.bias
        shape = _scale_shape(self.weight, block_rows)
        scale = torch.empty(shape, dtype=torch.float32, device=device)
        self.register_buffer("scale", scale, persistent=False)
        if not linear.weight.is_meta:
            self.load(linear.weight)

    @torch.no_grad()
    def load(self, weight_ND: torch.Tensor) -> None:
        _quantize_into(weight_ND.to(self.weight.device), self.weight, self.scale)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        weight_ND = dequantize(self.weight, self.scale, x_TD.dtype)
        return F.linear(round_rows(x_TD), weight_ND, self.bias)


class RoundedLinear(nn.Linear):
    """A linear layer that computes as `Fp8Linear` does, from a weight in full precision.

    Its gradients are those of the rounded factors: roundings pass them on unchanged.
    """

    def __init__(self, linear: nn.Linear, block_rows: int) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate and fill another weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._block_rows = block_rows

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        weight_ND = rounded(self.weight, self._round)
        return F.linear(rounded(x_TD, round_rows), weight_ND, self.bias)

    def _round(self, weight_ND: torch.Tensor) -> torch.Tensor:
        return round_weight(weight_ND, self._block_rows, weight_ND.dtype)


def rounded_to_fp8(linears: Sequence[nn.Linear]) -> list[RoundedLinear]:
    """Layers that read the same input, for a trainer."""
    block_rows = block_rows_of([linear.out_features for linear in linears])
    return [RoundedLinear(linear, block_rows) for linear in linears]


def stored_in_fp8(linears: Sequence[nn.Linear]) -> list[Fp8Linear]:
    """Layers that read the same input, for an engine."""
    block_rows = block_rows_of([linear.out_features for linear in linears])
    return [Fp8Linear(linear, block_rows) for linear in linears]
