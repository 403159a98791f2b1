"""Linear layers of a fused decoder: weights side by side, and which kernel multiplies with them.

Projections that read the same input are adjacent in memory (`fuse_linears`), and each parameter
becomes a view: loading a weight by name writes where the kernels read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from areal.engine.native.cuda.block_kernels import gate_mul
from areal.engine.native.cuda.skinny_linear import SkinnyWorkspace, skinny_gate_up, skinny_linear
from areal.engine.native.cuda.small_linear import small_gate_up, small_linear


@dataclass(frozen=True, slots=True)
class Products:
    """Matrix products of one forward, by small_linear.py, skinny_linear.py or cuBLAS."""

    by: Literal["small", "skinny", "cublas"]
    space: SkinnyWorkspace

    def project(
        self, x_TD: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if self.by == "cublas":
            return F.linear(x_TD, weight, bias)
        out = x_TD.new_empty(len(x_TD), len(weight))
        if self.by == "skinny":
            skinny_linear(x_TD, weight, bias, out, self.space)
        else:
            small_linear(x_TD, weight, bias, out)
        return out

    def project_back(self, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        """To the model dim; with several ranks the module itself sums over them."""
        return linear(x) if self.by == "cublas" else self.project(x, linear.weight, linear.bias)

    def gate_up(
        self, x_TD: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        """activation(x W1') * (x W3'), W1 above W3 in one weight."""
        activated_TF = x_TD.new_empty(len(x_TD), len(weight) // 2)
        if self.by == "small":
            small_gate_up(x_TD, None, weight, activation, activated_TF)
        elif self.by == "skinny":
            skinny_gate_up(x_TD, weight, activation, activated_TF, self.space)
        else:
            gate_mul(F.linear(x_TD, weight, bias), activation, activated_TF)
        return activated_TF


def fuse_linears(linears: list[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Fused weights [sum of outputs, D] and biases; the modules' own become views of them.

    Linears that are already fused (a second engine on one model) keep their storage.
    """
    biases = [x.bias for x in linears if x.bias is not None]
    return _fuse([x.weight for x in linears]), _fuse(biases) if biases else None


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
