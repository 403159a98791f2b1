"""Batch-invariant numerics: a row's result has the same bits whatever other rows are in the batch.

Libraries choose a matrix kernel by the number of rows, and kernels sum in different orders. Here
every linear layer uses one kernel, chosen by its weight alone (invariant_matmul.py); everything
else in the decoder except attention is row-wise anyway. With `rows_attention` on both sides,
log-probabilities of the native engine equal those of the trainer exactly. Experts have no such
kernel.

On a CPU the usual products are invariant if rows come in whole tiles (utils/device.py); the trainer
pads to them, attends row by row as the native engine does, and reads log-probabilities by
`drawn_logprobs`, as its sampler does. Experts are computed so as well.

Gradients are computed by the usual kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from areal.models.common.decoder import Decoder


def make_invariant(model: Decoder) -> None:
    """Make every linear layer of `model` batch-invariant. Parameters and their names stay."""
    if model.embedding_weight.is_cuda:
        _use_invariant_linears(model)
    if model.tower is not None:
        model.tower.one_by_one = True


def _use_invariant_linears(model: Decoder) -> None:
    if model.args.moe is not None:
        raise ValueError(
            "batch_invariant: there is no such kernel for experts; turn it off for this model"
        )
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, InvariantLinear(child))


class InvariantLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return _InvariantLinear.apply(x_TD, self.weight, self.bias)


class _InvariantLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, weight_ND, bias_N):
        from areal.models.common.invariant_matmul import invariant_matmul  # needs Triton

        ctx.save_for_backward(x_TD, weight_ND)
        ctx.has_bias = bias_N is not None
        return invariant_matmul(x_TD, weight_ND, bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TN):
        x_TD, weight_ND = ctx.saved_tensors
        grad_bias = grad_TN.float().sum(0).to(grad_TN.dtype) if ctx.has_bias else None
        return grad_TN @ weight_ND, grad_TN.T @ x_TD, grad_bias


def invariant_logits(hidden_TD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """`float32_logits` by the batch-invariant kernel; on a CPU, of whole tiles of rows."""
    if not hidden_TD.is_cuda:
        return F.linear(hidden_TD, weight_VD)
    from areal.models.common.invariant_matmul import invariant_matmul  # needs Triton

    return invariant_matmul(hidden_TD, weight_VD, None, out_dtype=torch.float32)


def row_logprobs(
    logits_TV: torch.Tensor, tokens_T: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """log p of one token per row. On a GPU softmax uses one block per row, so a row's bits depend
    on the vocabulary size only; a plain reduction would be split by the number of rows."""
    if not logits_TV.is_cuda:
        probs_TV = (logits_TV.double() / temperature).softmax(-1)
        return drawn_logprobs(probs_TV, probs_TV.cumsum(-1), tokens_T).float()
    scaled_TV = logits_TV if temperature == 1.0 else logits_TV / temperature
    return torch.log_softmax(scaled_TV, dim=-1).gather(1, tokens_T[:, None]).squeeze(1)


def drawn_logprobs(
    probs_TV: torch.Tensor, cumulative_TV: torch.Tensor, tokens_T: torch.Tensor
) -> torch.Tensor:
    """log p of one token per row of the distribution that was drawn from: its cumulative sum ends
    near 1, or near what cuts have left of it."""
    prob_T = probs_TV.gather(1, tokens_T[:, None]).squeeze(1)
    return (prob_T / cumulative_TV[:, -1]).log()


def with_gradients_of(
    reference: Callable[..., torch.Tensor],
    fast: Callable[..., torch.Tensor],
    tensors: Sequence[torch.Tensor],
) -> torch.Tensor:
    """`fast(*tensors)` with the gradients of `reference(*tensors)`, recomputed in backward."""
    return _Recomputed.apply(reference, fast, *tensors)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, reference, fast, *tensors):
        ctx.reference = reference
        ctx.save_for_backward(*tensors)
        return fast(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        tensors = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.reference(*tensors)
        return None, None, *torch.autograd.grad(out, tensors, grad)
