"""The matrix products of a linear layer in FP8, forward and backward, and what they multiply.

    y = x W'      dx = g W      dW = g' x            each product of FP8 factors, summed in float32

Rows of x and of g have a scale for each 128 features, weights for each 128 x 128, which serves both
of their products. Values are e4m3 and scales powers of two (fp8.py). For dW, a sum over tokens, a
factor is transposed and gets one scale, the largest it has: exponents change, digits do not, except
that numbers below 2**-6 of the scale (2**-14 of the largest) lose some, and below 2**-10 all.

Hopper multiplies FP8 (`uses_tensor_cores`). Elsewhere the factors are made the model's dtype, in
which they are exact: the same numbers up to the order of sums, and no faster.

A layer and its gradients are one operator of torch each, opaque to its compiler: the host has less
to do per layer than the device. Tokens are padded with zeros to a multiple of 128.

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
Rows = tuple[torch.Tensor, torch.Tensor]  # FP8 [P, D], and scales [G, P]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _operator(name: str) -> Callable[[_Function], _Function]:
    """Make a function the operator areal::NAME, by the schema of its annotations."""

    def register(function: _Function) -> _Function:
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(f"{name}{schema}")
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        return cast(_Function, getattr(torch.ops.areal, name).default)

    return register


@_operator("fp8_linear")
def linear(
    x_TD: torch.Tensor, weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x W' [T, N], and the rows of x in FP8 that `linear_back` reads.

    Several weights with the same inputs are one, the first on top: N counts the rows of all.
    """
    rows = quantize(x_TD)
    return times_weights(rows, weights, len(x_TD), back=False), *rows


@torch.library.register_fake("areal::fp8_linear")
def _(x_TD, weights):
    out_TN = weights[0].new_empty(x_TD.shape[0], sum(len(weight) for weight in weights))
    return out_TN, *_like_rows(x_TD, x_TD.shape[1])


@_operator("fp8_linear_back")
def linear_back(
    grad_TN: torch.Tensor,
    q_PD: torch.Tensor,
    scale_GP: torch.Tensor,
    weights: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the input and of the weights [N, D]."""
    rows = quantize(grad_TN)
    grad_TD = times_weights(rows, weights, len(grad_TN), back=True)
    return grad_TD, weight_grad(rows, (q_PD, scale_GP), weights[0].dtype)


@torch.library.register_fake("areal::fp8_linear_back")
def _(grad_TN, q_PD, scale_GP, weights):
    dim = weights[0].shape[1]
    new = weights[0].new_empty
    return new(grad_TN.shape[0], dim), new(grad_TN.shape[1], dim)


@_operator("fp8_feed_forward")
def feed_forward(
    x_TD: torch.Tensor, w1_FD: torch.Tensor, w3_FD: torch.Tensor, w2_DF: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """w2(silu(w1(x)) * w3(x)), whose product of gate and up exists in FP8 only, and what
    `feed_forward_back` reads: rows of x, gate and up, rows of their product."""
    num_tokens, rows = len(x_TD), quantize(x_TD)
    gate_up_T2F = times_weights(rows, [w1_FD, w3_FD], num_tokens, back=False)
    hidden = quantize_gated(gate_up_T2F)
    return times_weights(hidden, [w2_DF], num_tokens, back=False), *rows, gate_up_T2F, *hidden


@torch.library.register_fake("areal::fp8_feed_forward")
def _(x_TD, w1_FD, w3_FD, w2_DF):
    num_tokens, hidden_dim = x_TD.shape[0], w1_FD.shape[0]
    gate_up_T2F = w1_FD.new_empty(num_tokens, 2 * hidden_dim)
    hidden = _like_rows(x_TD, hidden_dim)
    return w2_DF.new_empty(x_TD.shape), *_like_rows(x_TD, x_TD.shape[1]), gate_up_T2F, *hidden


@_operator("fp8_feed_forward_back")
def feed_forward_back(
    grad_TD: torch.Tensor,
    q_PD: torch.Tensor,
    scale_GP: torch.Tensor,
    gate_up_T2F: torch.Tensor,
    hidden_q_PF: torch.Tensor,
    hidden_scale: torch.Tensor,
    w1_FD: torch.Tensor,
    w3_FD: torch.Tensor,
    w2_DF: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the input, of w1 on top of w3 [2 F, D], and of w2."""
    num_tokens, dtype, rows = len(grad_TD), w1_FD.dtype, quantize(grad_TD)
    w2_grad = weight_grad(rows, (hidden_q_PF, hidden_scale), dtype)
    hidden_TF = times_weights(rows, [w2_DF], num_tokens, back=True)
    made = quantize_gate_grads(hidden_TF, gate_up_T2F)
    grad_TD = times_weights(made, [w1_FD, w3_FD], num_tokens, back=True)
    return grad_TD, weight_grad(made, (q_PD, scale_GP), dtype), w2_grad


@torch.library.register_fake("areal::fp8_feed_forward_back")
def _(grad_TD, q_PD, scale_GP, gate_up_T2F, hidden_q_PF, hidden_scale, w1_FD, w3_FD, w2_DF):
    new = w1_FD.new_empty
    both = new(2 * w1_FD.shape[0], w1_FD.shape[1])
    return new(grad_TD.shape), both, new(w2_DF.shape)


def quantize(x_TD: torch.Tensor) -> Rows:
    if x_TD.is_cuda:
        from areal.models.common import fp8_training_kernels as kernels  # needs Triton

        return kernels.quantize(x_TD.contiguous())
    return _rows(x_TD)


def quantize_gated(gate_up_T2F: torch.Tensor) -> Rows:
    """Of silu(gate) * up, which is rounded nowhere else."""
    if gate_up_T2F.is_cuda:
        from areal.models.common import fp8_training_kernels as kernels  # needs Triton

        return kernels.quantize_gated(gate_up_T2F.contiguous())
    gate_TF, up_TF = gate_up_T2F.float().chunk(2, 1)
    return _rows(F.silu(gate_TF) * up_TF)


def quantize_gate_grads(grad_TF: torch.Tensor, gate_up_T2F: torch.Tensor) -> Rows:
    """[P, 2 F] of the gradients of gate and up, from that of silu(gate) * up."""
    if grad_TF.is_cuda:
        from areal.models.common import fp8_training_kernels as kernels  # needs Triton

        return kernels.quantize_gate_grads(grad_TF.contiguous(), gate_up_T2F.contiguous())
    grad, (gate, up) = grad_TF.float(), gate_up_T2F.float().chunk(2, 1)
    sigmoid = torch.sigmoid(gate)
    gate_grad = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return _rows(torch.cat([gate_grad, grad * gate * sigmoid], 1))


def times_weights(
    rows: Rows, weights: Sequence[torch.Tensor], num_tokens: int, *, back: bool
) -> torch.Tensor:
    """x W' [T, N] of rows of x, or, `back`, g W [T, D] of rows of g; in the weights' dtype."""
    factor = quantize_weights(weights, transposed=back)
    return _product(*rows, *factor, weights[0].dtype)[:num_tokens]


def weight_grad(grad: Rows, x: Rows, dtype: torch.dtype) -> torch.Tensor:
    """g' x [N, D]."""
    (grad_q_NP, grad_scale), (x_q_DP, x_scale) = transpose(*grad), transpose(*x)
    if uses_tensor_cores(x_q_DP.device, len(grad_q_NP), len(x_q_DP), x_q_DP.shape[1]):
        scaling = ScalingType.TensorWise
        factors = (grad_q_NP, x_q_DP.t(), grad_scale, scaling, x_scale, scaling)
        return scaled_mm(*factors, output_dtype=dtype)
    factors = ((grad_q_NP.float() * grad_scale).to(dtype), (x_q_DP.float() * x_scale).to(dtype))
    return F.linear(*factors)


def transpose(q_PD: torch.Tensor, scale_GP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 [D, P] with one scale, a float32 of no dim."""
    if not len(q_PD):
        return q_PD.t(), scale_GP.new_ones(())
    top = scale_GP.amax()
    if q_PD.is_cuda:
        from areal.models.common import fp8_training_kernels as kernels  # needs Triton

        return kernels.transpose(q_PD, scale_GP, top), top
    return _exact(q_PD, scale_GP.t() / top, torch.float32).t().to(FP8).contiguous(), top


def quantize_weights(weights: Sequence[torch.Tensor], *, transposed: bool) -> Rows:
    """FP8 [N, D] of weights [., D] on top of each other and their scales, or [D, N]; the last dim
    of scales is padded to multiples of 4."""
    first = weights[0]
    if any(len(weight) % GROUP for weight in weights[:-1]):  # a block would have rows of two
        weights = [torch.cat(list(weights))]
    rows, dim = sum(len(weight) for weight in weights), first.shape[1]
    shape = (dim, rows) if transposed else (rows, dim)
    blocks, groups = (-(-size // GROUP) for size in shape)
    room = -(-groups // _SCALES_MULTIPLE) * _SCALES_MULTIPLE
    if first.is_cuda:
        from areal.models.common import fp8_training_kernels as kernels  # needs Triton

        q = first.new_empty(shape, dtype=FP8)
        scale = first.new_empty(blocks, room, dtype=torch.float32)
        weights = [weight.contiguous() for weight in weights]
        kernels.quantize_weights(weights, q, scale, transposed=transposed)
        return q, scale
    weight = _finite(torch.cat(list(weights)))
    weight = F.pad(weight.t() if transposed else weight, (0, 0, 0, -shape[0] % GROUP))
    q, scale = quantize_blocks(weight, GROUP)
    return q[: shape[0]], F.pad(scale, (0, room - groups))


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


def _like_rows(x_TD: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens = x_TD.shape[0]
    padded = (num_tokens + GROUP - 1) // GROUP * GROUP
    q_PD = x_TD.new_empty(padded, dim, dtype=FP8)
    return q_PD, x_TD.new_empty(-(-dim // GROUP), padded, dtype=torch.float32)
