"""Log-probability and entropy of the next token, without the logits of the whole batch.

The LM head turns `[T, D]` into `[T, V]`, which for a large vocabulary is far more memory than the
model. Here at most `chunk_size` rows of float32 logits exist at a time, in the forward pass and
again in the backward pass, which computes them anew.

Shape legend: T packed tokens, C tokens of one chunk, D model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.autograd.function import once_differentiable

from areal.models.common.invariant import invariant_logits, row_logprobs
from areal.models.common.lm_head import float32_logits


def next_token_logprobs(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_T: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log p(labels), entropy) `[T]` in float32, of softmax(hidden weight^T / temperature).

    Only the log-probability carries a gradient. `batch_invariant` computes it with the kernels of
    models/common/invariant.py.
    """
    return _ChunkedLogprobs.apply(
        hidden_TD, weight_VD, labels_T, temperature, chunk_size, batch_invariant
    )


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, labels_T, temperature, chunk_size, batch_invariant):
        logprobs_T = torch.empty(len(hidden_TD), dtype=torch.float32, device=hidden_TD.device)
        entropy_T, log_total_T = torch.empty_like(logprobs_T), torch.empty_like(logprobs_T)
        for chunk in _chunks(len(hidden_TD), chunk_size):
            logits_CV = _logits(hidden_TD[chunk], weight_VD, temperature, batch_invariant)
            log_total_C = logits_CV.logsumexp(dim=1)
            label_C = logits_CV.gather(1, labels_T[chunk, None]).squeeze(1)
            probs_CV = (logits_CV - log_total_C[:, None]).exp_()
            if batch_invariant:
                logprobs_T[chunk] = row_logprobs(logits_CV, labels_T[chunk])
            else:
                logprobs_T[chunk] = label_C - log_total_C
            entropy_T[chunk] = log_total_C - probs_CV.mul_(logits_CV).sum(dim=1)
            log_total_T[chunk] = log_total_C
        ctx.save_for_backward(hidden_TD, weight_VD, labels_T, log_total_T)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_T, _entropy_grad):
        hidden_TD, weight_VD, labels_T, log_total_T = ctx.saved_tensors
        grad_hidden_TD = torch.empty_like(hidden_TD)
        # float32, since a large vocabulary sums over very many chunks.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        for chunk in _chunks(len(hidden_TD), ctx.chunk_size):
            logits_CV = _logits(hidden_TD[chunk], weight_VD, ctx.temperature, False)
            scale_C1 = grad_T[chunk, None] / ctx.temperature
            # d logp(label) / d logits = onehot(label) - softmax
            grad_CV = (logits_CV - log_total_T[chunk, None]).exp_().mul_(-scale_C1)
            grad_CV.scatter_add_(1, labels_T[chunk, None], scale_C1)
            grad_CV = grad_CV.to(hidden_TD.dtype)
            grad_hidden_TD[chunk] = grad_CV @ weight_VD
            grad_weight_VD += grad_CV.T @ hidden_TD[chunk]
        return grad_hidden_TD, grad_weight_VD.to(weight_VD.dtype), None, None, None, None


def _logits(
    hidden_CD: torch.Tensor, weight_VD: torch.Tensor, temperature: float, batch_invariant: bool
) -> torch.Tensor:
    logits_CV = (invariant_logits if batch_invariant else float32_logits)(hidden_CD, weight_VD)
    return logits_CV if temperature == 1.0 else logits_CV / temperature


def _chunks(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
