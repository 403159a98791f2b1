"""Linear layers of a fused decoder: weights side by side, and which kernel multiplies with them.

Projections that read the same input are adjacent in memory (`fuse_linears`), and each parameter
becomes a view: loading a weight by name writes where the kernels read. What adapters add to such a
projection is computed after it (adapter_linear.py).

FP8 weights (models/common/fp8.py) are multiplied with quantized rows: up to 64 by
skinny_linear.py, more by cuBLAS where it knows such blocks. Elsewhere both factors are made
bfloat16, in which they are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import ScalingType, scaled_mm

from areal.engine.native.cuda.adapter_linear import AdapterRows
from areal.engine.native.cuda.block_kernels import gate_mul, gate_mul_fp8, quantized
from areal.engine.native.cuda.fp8_tensors import Fp8Rows, Fp8Weight
from areal.engine.native.cuda.skinny_linear import (
    SkinnyWorkspace,
    skinny_gate_up,
    skinny_linear,
)
from areal.engine.native.cuda.small_linear import small_gate_up, small_linear
from areal.models.common.fp8 import GROUP, dequantize
from areal.models.common.fp8_linear import Fp8Linear
from areal.models.common.tensor_parallel import SummedLinear

Weight = torch.Tensor | Fp8Weight


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """Linear layers that read the same input, as one."""

    weight: Weight
    bias: torch.Tensor | None
    linears: tuple[nn.Linear, ...] = ()


@dataclass(frozen=True, slots=True)
class Products:
    """Matrix products of one forward, by small_linear.py, skinny_linear.py or cuBLAS.

    The rows to multiply with FP8 weights may be given quantized.
    """

    by: Literal["small", "skinny", "cublas"]
    space: SkinnyWorkspace
    dtype: torch.dtype
    adapters: AdapterRows | None = None  # those of the rows, if there are any

    def project(self, x_TD: torch.Tensor | Fp8Rows, projection: Projection) -> torch.Tensor:
        if isinstance(projection.weight, Fp8Weight):
            return self._fp8_project(_quantized(x_TD), projection.weight, projection.bias)
        assert not isinstance(x_TD, Fp8Rows), "rows are quantized for FP8 weights only"
        if projection.linears and isinstance(projection.linears[0], SummedLinear):
            return projection.linears[0](x_TD)  # sums over the ranks
        out = self._product(x_TD, projection)
        if self.adapters is not None:
            self.adapters.add(id(projection), x_TD, out)
        return out

    def _product(self, x_TD: torch.Tensor, projection: Projection) -> torch.Tensor:
        """Without adapters."""
        weight, bias = projection.weight, projection.bias
        assert isinstance(weight, torch.Tensor), "FP8 weights have products of their own"
        if self.by == "cublas":
            return F.linear(x_TD, weight, bias)
        out = x_TD.new_empty(len(x_TD), len(weight))
        if self.by == "skinny":
            skinny_linear(x_TD, weight, bias, out, self.space)
        else:
            small_linear(x_TD, weight, bias, out)
        return out

    def gate_up(
        self, x_TD: torch.Tensor | Fp8Rows, projection: Projection, activation: str
    ) -> torch.Tensor | Fp8Rows:
        """activation(x W1') * (x W3'), W1 above W3 in one weight."""
        weight = projection.weight
        if self.adapters is not None and id(projection) in self.adapters.stacks:
            assert isinstance(x_TD, torch.Tensor), "FP8 weights have no adapters beside them"
            gate_up_T2F = self._product(x_TD, projection)
            return self.adapters.add_and_gate(id(projection), x_TD, gate_up_T2F, activation)
        if self.by == "cublas":
            gate_up_T2F = self.project(x_TD, projection)
            if isinstance(weight, Fp8Weight):
                return gate_mul_fp8(gate_up_T2F, activation)
            activated_TF = gate_up_T2F.new_empty(len(x_TD), len(weight) // 2)
            gate_mul(gate_up_T2F, activation, activated_TF)
            return activated_TF
        device = self.space.sums.device
        activated_TF = torch.empty(len(x_TD), len(weight) // 2, dtype=self.dtype, device=device)
        if isinstance(weight, Fp8Weight):
            skinny_gate_up(_quantized(x_TD), weight, activation, activated_TF, self.space)
            return activated_TF
        assert not isinstance(x_TD, Fp8Rows), "rows are quantized for FP8 weights only"
        if self.by == "small":
            small_gate_up(x_TD, None, weight, activation, activated_TF)
        else:
            skinny_gate_up(x_TD, weight, activation, activated_TF, self.space)
        return activated_TF

    def _fp8_project(
        self, x: Fp8Rows, weight: Fp8Weight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if self.by == "cublas":
            return _many_fp8_rows(x, weight, bias, self.dtype)
        out = torch.empty(len(x), len(weight), dtype=self.dtype, device=x.q_MD.device)
        skinny_linear(x, weight, bias, out, self.space)
        return out


def _quantized(x_TD: torch.Tensor | Fp8Rows) -> Fp8Rows:
    return x_TD if isinstance(x_TD, Fp8Rows) else quantized(x_TD)


def _many_fp8_rows(
    x: Fp8Rows, weight: Fp8Weight, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    if not _cublas_takes(x, weight):
        x_TD = dequantize(x.q_MD, x.scale_MG, dtype)
        return F.linear(x_TD, dequantize(weight.q_ND, weight.scale_BG, dtype), bias)
    rows = x.with_padding()
    # cuBLAS reads the scales of a row of blocks in fours.
    scale_BG = F.pad(weight.scale_BG, (0, -weight.scale_BG.shape[1] % 4))
    out_TN = scaled_mm(
        rows.q_MD, weight.q_ND.t(),
        rows.scale_MG, ScalingType.BlockWise1x128,
        scale_BG.t(), ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )[: len(x)]  # fmt: skip
    return out_TN if bias is None else out_TN.add_(bias)


def _cublas_takes(x: Fp8Rows, weight: Fp8Weight) -> bool:
    """Blocks of 128 x 128 and more rows than 64, on Hopper."""
    is_whole = weight.block_rows == GROUP and x.q_MD.shape[1] % GROUP == 0 and len(x) > 64
    return is_whole and x.q_MD.is_cuda and torch.cuda.get_device_capability() == (9, 0)


def fuse_linears(*linears: nn.Linear) -> Projection:
    """Weights [sum of outputs, D] and biases as one; the modules' own become views of them.

    Linears that are already fused (a second engine on one model) keep their storage.
    """
    biases = [x.bias for x in linears if x.bias is not None]
    weight: Weight = _fuse([x.weight for x in linears])
    scales = [x.scale for x in linears if isinstance(x, Fp8Linear)]
    if scales:
        weight = Fp8Weight(weight, _fuse(scales))
    return Projection(weight, _fuse(biases) if biases else None, linears)


def _fuse(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    first = parameters[0].data
    rows = sum(len(parameter) for parameter in parameters)
    if _lie_side_by_side(parameters):
        return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
    fused = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = fused[start : start + len(parameter)]
        start += len(parameter)
    return fused


def _lie_side_by_side(parameters: Sequence[torch.Tensor]) -> bool:
    end = parameters[0].data_ptr()
    storage = parameters[0].untyped_storage().data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != end or parameter.untyped_storage().data_ptr() != storage:
            return False
        end += parameter.numel() * parameter.element_size()
    return True
