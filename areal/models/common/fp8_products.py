"""The matrix products of a linear layer in FP8, forward and backward, and what they multiply.

    y = x W'      dx = g W      dW = g' x            each product of FP8 factors, summed in float32

A factor's scales lie along the sum: `rows` of x and of g have one for 128 features (for y and dx),
their `columns` one for 128 tokens (for dW), so x and g are each quantized in both directions.
Weights have one for 128 x 128, which serves both of their products. Values are e4m3 and scales
powers of two (fp8.py).

Hopper multiplies FP8 (`uses_tensor_cores`). Elsewhere the factors are made the model's dtype, in
which they are exact: the same numbers up to the order of sums, and no faster.

Functions here are operators of torch, opaque to its compiler. Tokens are padded with zeros to a
multiple of 128.

Shapes: T tokens, P padded, D and N features in and out, F hidden features, G and H groups of 128
features and of 128 tokens. Scales of rows are [G, P], of columns [H, D].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, scaled_mm

from areal.models.common.fp8 import FP8, GROUP, quantize_blocks

_HOPPER = (9, 0)
_SCALES_MULTIPLE = 4  # of a weight's scales in memory, as cuBLAS reads them


@torch.library.custom_op("areal::fp8_quantize", mutates_args=())
def quantize(
    x_TD: torch.Tensor, both: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [P, D] with scales, and columns [D, P] with scales; without `both` these are empty."""
    if x_TD.is_cuda:
        from areal.models.common import fp8_training_kernels as kernels  # needs Triton

        return kernels.quantize(x_TD.contiguous(), both=both)
    rows = _rows(x_TD)
    return *rows, *_columns(x_TD if both else x_TD[:0])


@quantize.register_fake
def _(x_TD, both):
    num_tokens, dim = x_TD.shape
    return *_like_rows(x_TD, num_tokens, dim), *_like_columns(x_TD, num_tokens * both, dim)


@torch.library.custom_op("areal::fp8_quantize_gated", mutates_args=())
def quantize_gated(gate_TF: torch.Tensor, up_TF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of silu(gate) * up, which is rounded nowhere else."""
    if gate_TF.is_cuda:
        from areal.models.common import fp8_training_kernels as kernels  # needs Triton

        return kernels.quantize_gated(gate_TF.contiguous(), up_TF.contiguous())
    return _rows(F.silu(gate_TF.float()) * up_TF.float())


@quantize_gated.register_fake
def _(gate_TF, up_TF):
    return _like_rows(gate_TF, *gate_TF.shape)


@torch.library.custom_op("areal::fp8_quantize_gate_grads", mutates_args=())
def quantize_gate_grads(
    grad_TF: torch.Tensor, gate_TF: torch.Tensor, up_TF: torch.Tensor
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
]:  # fmt: skip
    """Of the gradient of silu(gate) * up: rows and columns of the gradient of gate, of up, and the
    columns of silu(gate) * up itself."""
    if gate_TF.is_cuda:
        from areal.models.common import fp8_training_kernels as kernels  # needs Triton

        inputs = (grad_TF.contiguous(), gate_TF.contiguous(), up_TF.contiguous())
        return kernels.quantize_gate_grads(*inputs)  # pyright: ignore[reportReturnType]  # ten
    grad, gate, up = grad_TF.float(), gate_TF.float(), up_TF.float()
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    gate_grad, up_grad = grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu
    of_gate, of_up = (
        (*_rows(gate_grad), *_columns(gate_grad)),
        (*_rows(up_grad), *_columns(up_grad)),
    )
    return *of_gate, *of_up, *_columns(silu * up)


@quantize_gate_grads.register_fake
def _(grad_TF, gate_TF, up_TF):
    rows = [_like_rows(gate_TF, *gate_TF.shape) for _ in range(2)]
    columns = [_like_columns(gate_TF, *gate_TF.shape) for _ in range(3)]
    return *rows[0], *columns[0], *rows[1], *columns[1], *columns[2]


@torch.library.custom_op("areal::fp8_times_weight", mutates_args=())
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
    out = _product(q_PD, scale_GP, q, scale, ScalingType.BlockWise128x128, weight.dtype)
    return out[:num_tokens]


@times_weight.register_fake
def _(q_PD, scale_GP, weights, num_tokens, back):
    dim = weights[0].shape[1] if back else sum(len(weight) for weight in weights)
    return weights[0].new_empty(num_tokens, dim)


@torch.library.custom_op("areal::fp8_weight_grad", mutates_args=())
def weight_grad(
    grad_q_NP: torch.Tensor,
    grad_scale_HN: torch.Tensor,
    x_q_DP: torch.Tensor,
    x_scale_HD: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """g' x [N, D] of columns."""
    return _product(grad_q_NP, grad_scale_HN, x_q_DP, x_scale_HD, ScalingType.BlockWise1x128, dtype)


@weight_grad.register_fake
def _(grad_q_NP, grad_scale_HN, x_q_DP, x_scale_HD, dtype):
    return grad_q_NP.new_empty(len(grad_q_NP), len(x_q_DP), dtype=dtype)


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
    """Whether a product with these sizes is one of FP8."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == _HOPPER
    return is_hopper and not any(dim % 16 for dim in dims)


def _product(
    a_q: torch.Tensor,
    a_scale: torch.Tensor,
    b_q: torch.Tensor,
    b_scale: torch.Tensor,
    b_scaling: ScalingType,
    dtype: torch.dtype,
) -> torch.Tensor:
    """a b', both with the sum along their last dim. `a` has scales [groups, rows]; so has b, or, in
    blocks, [blocks of rows, groups]."""
    is_blocks = b_scaling is ScalingType.BlockWise128x128
    if uses_tensor_cores(a_q.device, len(b_q), *a_q.shape):
        return scaled_mm(
            a_q, b_q.t(),
            a_scale.t(), ScalingType.BlockWise1x128,
            b_scale.t(), b_scaling,
            output_dtype=dtype,
        )  # fmt: skip
    b = _exact(b_q, b_scale.repeat_interleave(GROUP, 0) if is_blocks else b_scale.t(), dtype)
    return F.linear(_exact(a_q, a_scale.t(), dtype), b)


def _exact(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    num_rows, dim = q.shape
    scale = scale[:num_rows].repeat_interleave(GROUP, 1)[:, :dim]
    return (q.float() * scale).to(dtype)


def _rows(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q_PD, scale_PG = quantize_blocks(_finite(_padded(x_TD)), 1)
    return q_PD, scale_PG.t().contiguous()


def _columns(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q_DP, scale_DH = quantize_blocks(_finite(_padded(x_TD).t()), 1)
    return q_DP, scale_DH.t().contiguous()


def _padded(x_TD: torch.Tensor) -> torch.Tensor:
    return F.pad(x_TD, (0, 0, 0, -len(x_TD) % GROUP))


def _finite(x: torch.Tensor) -> torch.Tensor:
    """With NaN for what is infinite, as in the kernels."""
    return x.masked_fill(x.isinf(), torch.nan)


def _like_rows(like: torch.Tensor, num_tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    padded = (num_tokens + GROUP - 1) // GROUP * GROUP
    q_PD = like.new_empty(padded, dim, dtype=FP8)
    return q_PD, like.new_empty(-(-dim // GROUP), padded, dtype=torch.float32)


def _like_columns(
    like: torch.Tensor, num_tokens: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = (num_tokens + GROUP - 1) // GROUP
    q_DP = like.new_empty(dim, groups * GROUP, dtype=FP8)
    return q_DP, like.new_empty(groups, dim, dtype=torch.float32)
