"""The matrix products of a linear layer in FP8, forward and backward, and what they multiply.

    y = x W'      dx = g W      dW = g' x            each product of FP8 factors, summed in float32

Rows of x and of g have a scale for each 128 features, weights for each 128 x 128, which serves both
of their products. Values are e4m3 and scales powers of two (fp8.py). For dW, a sum over tokens, a
factor is transposed and gets one scale, the largest it has: exponents change, digits do not, except
that numbers below 2**-6 of the scale (2**-14 of the largest) lose some, and below 2**-10 all.

Hopper multiplies FP8 (`uses_tensor_cores`). Elsewhere the factors are made the model's dtype, in
which they are exact: the same numbers up to the order of sums, and no faster.

Functions here are operators of torch, opaque to its compiler. Tokens are padded with zeros to a
multiple of 128.

Shapes: T tokens, P padded, D and N features in and out, F hidden features, G groups of 128
features. Scales of rows are [G, P].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, scaled_mm

from areal.models.common.fp8 import FP8, GROUP, quantize_blocks

_HOPPER = (9, 0)
# Not torch.library.custom_op, whose calls cost the host five times as much.
_LIBRARY = torch.library.Library("areal", "FRAGMENT")
_SCALES_MULTIPLE = 4  # of a weight's scales in memory, as cuBLAS reads them
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _operator(name: str) -> Callable[[_Function], _Function]:
    """Make a function the operator areal::NAME, by the schema of its annotations."""

    def register(function: _Function) -> _Function:
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(f"{name}{schema}")
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        return cast(_Function, getattr(torch.ops.areal, name).default)

    return register


@_operator("fp8_quantize")
def quantize(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [P, D] and their scales."""
    if x_TD.is_cuda:
        from areal.models.common import fp8_training_kernels as kernels  # needs Triton

        return kernels.quantize(x_TD.contiguous())
    return _rows(x_TD)


@torch.library.register_fake("areal::fp8_quantize")
def _(x_TD):
    return _like_rows(x_TD)


@_operator("fp8_quantize_gated")
def quantize_gated(gate_TF: torch.Tensor, up_TF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of silu(gate) * up, which is rounded nowhere else."""
    if gate_TF.is_cuda:
        from areal.models.common import fp8_training_kernels as kernels  # needs Triton

        return kernels.quantize_gated(gate_TF.contiguous(), up_TF.contiguous())
    return _rows(F.silu(gate_TF.float()) * up_TF.float())


@torch.library.register_fake("areal::fp8_quantize_gated")
def _(gate_TF, up_TF):
    return _like_rows(gate_TF)


@_operator("fp8_quantize_gate_grads")
def quantize_gate_grads(
    grad_TF: torch.Tensor, gate_TF: torch.Tensor, up_TF: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of the gradients of gate and of up, from that of silu(gate) * up."""
    if gate_TF.is_cuda:
        from areal.models.common import fp8_training_kernels as kernels  # needs Triton

        inputs = (grad_TF.contiguous(), gate_TF.contiguous(), up_TF.contiguous())
        return kernels.quantize_gate_grads(*inputs)
    grad, gate = grad_TF.float(), gate_TF.float()
    sigmoid = torch.sigmoid(gate)
    gate_grad = grad * up_TF.float() * sigmoid * (1 + gate * (1 - sigmoid))
    return *_rows(gate_grad), *_rows(grad * gate * sigmoid)


@torch.library.register_fake("areal::fp8_quantize_gate_grads")
def _(grad_TF, gate_TF, up_TF):
    return *_like_rows(gate_TF), *_like_rows(gate_TF)


@_operator("fp8_times_weight")
def times_weight(
    q_PD: torch.Tensor,
    scale_GP: torch.Tensor,
    weights: Sequence[torch.Tensor],
    num_tokens: int,
    back: bool,
) -> torch.Tensor:
    """x W' [T, N] of rows of x, or, `back`, g W [T, D] of rows of g; in the weights' dtype.

    Several weights with the same inputs are one, the first on top: N counts the rows of all.
    """
    weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
    q, scale = quantize_weight(weight, transposed=back)
    return _product(q_PD, scale_GP, q, scale, weight.dtype)[:num_tokens]


@torch.library.register_fake("areal::fp8_times_weight")
def _(q_PD, scale_GP, weights, num_tokens, back):
    dim = weights[0].shape[1] if back else sum(len(weight) for weight in weights)
    return weights[0].new_empty(num_tokens, dim)


@_operator("fp8_weight_grad")
def weight_grad(
    grad_q_PN: torch.Tensor,
    grad_scale_GP: torch.Tensor,
    x_q_PD: torch.Tensor,
    x_scale_GP: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """g' x [N, D] of rows of both."""
    grad_q_NP, grad_scale = transpose(grad_q_PN, grad_scale_GP)
    x_q_DP, x_scale = transpose(x_q_PD, x_scale_GP)
    if uses_tensor_cores(x_q_DP.device, len(grad_q_NP), len(x_q_DP), x_q_DP.shape[1]):
        scaling = ScalingType.TensorWise
        factors = (grad_q_NP, x_q_DP.t(), grad_scale, scaling, x_scale, scaling)
        return scaled_mm(*factors, output_dtype=dtype)
    factors = ((grad_q_NP.float() * grad_scale).to(dtype), (x_q_DP.float() * x_scale).to(dtype))
    return F.linear(*factors)


@torch.library.register_fake("areal::fp8_weight_grad")
def _(grad_q_PN, grad_scale_GP, x_q_PD, x_scale_GP, dtype):
    return grad_q_PN.new_empty(grad_q_PN.shape[1], x_q_PD.shape[1], dtype=dtype)


def transpose(q_PD: torch.Tensor, scale_GP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 [D, P] with one scale, a float32 of no dim."""
    if not len(q_PD):
        return q_PD.t(), scale_GP.new_ones(())
    top = scale_GP.amax()
    if q_PD.is_cuda:
        from areal.models.common import fp8_training_kernels as kernels  # needs Triton

        return kernels.transpose(q_PD, scale_GP, top), top
    return _exact(q_PD, scale_GP.t() / top, torch.float32).t().to(FP8).contiguous(), top


def quantize_weight(
    weight_ND: torch.Tensor, *, transposed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 [N, D] and its scales, or [D, N]; the last dim of scales is padded to multiples of 4."""
    num_rows, dim = reversed(weight_ND.shape) if transposed else weight_ND.shape
    blocks, groups = -(-num_rows // GROUP), -(-dim // GROUP)
    room = -(-groups // _SCALES_MULTIPLE) * _SCALES_MULTIPLE
    scale = weight_ND.new_zeros(blocks, room, dtype=torch.float32)
    if weight_ND.is_cuda:
        from areal.models.common import fp8_training_kernels as kernels  # needs Triton

        q = weight_ND.new_empty(num_rows, dim, dtype=FP8)
        kernels.quantize_weight(weight_ND.contiguous(), q, scale, transposed=transposed)
        return q, scale
    weight = _finite(weight_ND.t() if transposed else weight_ND)
    q, scale[:, :groups] = quantize_blocks(F.pad(weight, (0, 0, 0, -num_rows % GROUP)), GROUP)
    return q[:num_rows], scale


def uses_tensor_cores(device: torch.device, *dims: int) -> bool:
    """Whether a product with these sizes is one of FP8: multiples of 16, and not of no tokens."""
    return _is_hopper(device) and all(dim and dim % 16 == 0 for dim in dims)


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == _HOPPER


def _product(
    q_PK: torch.Tensor,
    scale_GP: torch.Tensor,
    weight_q_MK: torch.Tensor,
    weight_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Rows times a weight in blocks, [P, M], of which K features are summed."""
    if uses_tensor_cores(q_PK.device, len(weight_q_MK), *q_PK.shape):
        return scaled_mm(
            q_PK, weight_q_MK.t(),
            scale_GP.t(), ScalingType.BlockWise1x128,
            weight_scale.t(), ScalingType.BlockWise128x128,
            output_dtype=dtype,
        )  # fmt: skip
    weight_MK = _exact(weight_q_MK, weight_scale.repeat_interleave(GROUP, 0), dtype)
    return F.linear(_exact(q_PK, scale_GP.t(), dtype), weight_MK)


def _exact(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    num_rows, dim = q.shape
    scale = scale[:num_rows].repeat_interleave(GROUP, 1)[:, :dim]
    return (q.float() * scale).to(dtype)


def _rows(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x_PD = F.pad(x_TD, (0, 0, 0, -len(x_TD) % GROUP))
    q_PD, scale_PG = quantize_blocks(_finite(x_PD), 1)
    return q_PD, scale_PG.t().contiguous()


def _finite(x: torch.Tensor) -> torch.Tensor:
    """With NaN for what is infinite, as in the kernels."""
    return x.masked_fill(x.isinf(), torch.nan)


def _like_rows(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, dim = x_TD.shape
    padded = (num_tokens + GROUP - 1) // GROUP * GROUP
    q_PD = x_TD.new_empty(padded, dim, dtype=FP8)
    return q_PD, x_TD.new_empty(-(-dim // GROUP), padded, dtype=torch.float32)
