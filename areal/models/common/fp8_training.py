"""Layers that train in FP8: forward and backward products have blockwise FP8 factors.

Weights, activations between layers and gradients that leave keep the model's dtype; the optimizer
is not affected. For the backward pass a layer keeps its input in FP8, not in the model's dtype.
Roundings pass gradients on unchanged: dx is g W of rounded g and W, dW is g' x of rounded g and x.

Shapes: T tokens, D and N features in and out, F hidden features (fp8_products.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import nn

from areal.models.common.attention import Attention
from areal.models.common.fp8 import GROUP
from areal.models.common.fp8_linear import RoundedLinear
from areal.models.common.fp8_products import (
    feed_forward,
    feed_forward_back,
    linear,
    linear_back,
)
from areal.models.common.moe import FeedForward

if TYPE_CHECKING:
    from areal.models.common.decoder import Decoder

# Layers that are never in FP8: naming them to exclude them is allowed.
NEVER = ("output", "router", "score")


def train_in_fp8(model: Decoder, exclude_modules: Sequence[str]) -> None:
    """Replace the linear layers of all blocks in place, but those whose name, like
    `layers.0.attention.wq`, has a part of `exclude_modules`.

    In a model that `Decoder.round_to_fp8` has prepared these still round as a server does."""
    unused = set(exclude_modules) - set(NEVER)
    for name, module in list(model.layers.named_modules(prefix="layers")):
        if type(module) is not nn.Linear and type(module) is not RoundedLinear:
            continue
        matched = {part for part in exclude_modules if part in name}
        unused -= matched
        if not matched:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, BlockwiseLinear(module))
    if unused:
        raise ValueError(
            f"archon.fp8_config.exclude_modules: no linear layer has {sorted(unused)[0]!r} in its "
            "name; names are like layers.0.attention.wq and layers.0.feed_forward.w1"
        )
    for block in model.blocks:
        attention = block.attention
        if isinstance(attention, Attention) and _are_blockwise(attention, "wq", "wk", "wv"):
            attention.project_qkv = project_together
        if isinstance(block.feed_forward, FeedForward) and _can_fuse(block.feed_forward):
            block.feed_forward = BlockwiseFeedForward(block.feed_forward)


class BlockwiseLinear(nn.Linear):
    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate and fill another weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return project_together(x_TD, self)[0]


def project_together(x_TD: torch.Tensor, *linears: nn.Linear) -> list[torch.Tensor]:
    """The outputs of layers that read the same input, by one product in each direction."""
    weights = [linear.weight for linear in linears]
    out_TN = cast(torch.Tensor, _Linear.apply(x_TD, *weights))
    parts = out_TN.split([linear.out_features for linear in linears], 1)
    return [
        part.contiguous() if linear.bias is None else part + linear.bias
        for part, linear in zip(parts, linears, strict=True)
    ]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, *weights):
        out_TN, *rows = linear(x_TD, weights)
        ctx.save_for_backward(*rows, *weights)
        return out_TN

    @staticmethod
    def backward(ctx, grad_TN):
        q, scale, *weights = ctx.saved_tensors
        grad_TD, grad_ND = linear_back(grad_TN, q, scale, weights)
        return grad_TD, *grad_ND.split([len(weight) for weight in weights])


class BlockwiseFeedForward(FeedForward):
    """w2(silu(w1(x)) * w3(x)) in one step."""

    def __init__(self, dense: FeedForward) -> None:
        nn.Module.__init__(self)
        self.activation = dense.activation
        self.w1, self.w2, self.w3 = dense.w1, dense.w2, dense.w3

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        weights = (self.w1.weight, self.w3.weight, self.w2.weight)
        return cast(torch.Tensor, _FeedForward.apply(x_TD, *weights))


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, *weights):
        out_TD, *kept = feed_forward(x_TD, *weights)
        ctx.save_for_backward(*kept, *weights)
        return out_TD

    @staticmethod
    def backward(ctx, grad_TD):
        grad_TD, both_2FD, w2_grad = feed_forward_back(grad_TD, *ctx.saved_tensors)
        return grad_TD, *both_2FD.chunk(2), w2_grad


def _can_fuse(dense: FeedForward) -> bool:
    has_bias = any(linear.bias is not None for linear in (dense.w1, dense.w2, dense.w3))
    is_silu = dense.activation is F.silu
    is_whole = dense.w1.out_features % GROUP == 0  # no group has features of gate and of up
    return is_silu and is_whole and not has_bias and _are_blockwise(dense, "w1", "w2", "w3")


def _are_blockwise(owner: nn.Module, *names: str) -> bool:
    return all(isinstance(getattr(owner, name), BlockwiseLinear) for name in names)
