"""Log-probability and entropy of the next token, without the logits of the whole batch.

The LM head turns `[T, D]` into `[T, V]`, which for a large vocabulary is far more memory than the
model. Here at most `chunk_size` rows of float32 logits exist at a time, in the forward pass and
again in the backward pass, which recomputes them. On a GPU each logit is read once
(logprob_kernels.py). No gradient is computed for a frozen head.

Placeholders of images are no choices of a model that sees (`banned`): their probability is 0, here
as in the engine that samples. At a label that is one, in a prompt, the log-probability is 0 and has
no gradient.

With tensor parallelism each rank has some rows of the head, so W columns of the logits. They are
never gathered: the ranks exchange a maximum and three sums per token.

Shape legend: T packed tokens, C tokens of one chunk, D model dim, V vocabulary, W this rank's
columns of it (all without tensor parallelism).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from areal.models.common.decoder import float32_logits, softcap
from areal.models.common.invariant import invariant_logits, row_logprobs
from areal.utils.device import whole_tiles

_NEVER = -1e30  # a logit whose probability is 0


@dataclass(frozen=True, slots=True)
class VocabPart:
    """Which part of the vocabulary a rank's head covers; the group's parts make the whole."""

    first: int  # its first token id
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class _Head:
    """Options of the LM head, without its weight."""

    temperature: float
    softcap: float | None
    chunk_size: int
    batch_invariant: bool
    part: VocabPart | None
    banned: tuple[int, ...]


def next_token_logprobs(
    hidden_TD: torch.Tensor,
    weight_WD: torch.Tensor,
    labels_T: torch.Tensor,
    *,
    temperature: float = 1.0,
    logit_softcap: float | None = None,
    chunk_size: int = 1024,
    batch_invariant: bool = False,
    part: VocabPart | None = None,
    banned: tuple[int, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log p(labels), entropy) `[T]` in float32, of softmax(hidden weight^T / temperature).

    Only the log-probability carries a gradient. `batch_invariant` computes it with the kernels of
    models/common/invariant.py. With `part` all ranks of its group call with the same hidden states
    and labels and get the same result; the gradient of the hidden states is this rank's share of a
    sum over the group.
    """
    assert not (banned and logit_softcap), "a cap would lift banned logits"
    if batch_invariant:
        chunk_size = whole_tiles(chunk_size)
    head = _Head(temperature, logit_softcap, chunk_size, batch_invariant, part, banned)
    if not banned:
        return _ChunkedLogprobs.apply(hidden_TD, weight_WD, labels_T, head)
    is_banned_T = torch.isin(labels_T, torch.tensor(banned, device=labels_T.device))
    allowed = next(token for token in range(len(banned) + 1) if token not in banned)
    labels_T = labels_T.masked_fill(is_banned_T, allowed)
    logprobs_T, entropy_T = _ChunkedLogprobs.apply(hidden_TD, weight_WD, labels_T, head)
    return logprobs_T.masked_fill(is_banned_T, 0.0), entropy_T


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, weight_WD, labels_T, head: _Head):
        logprobs_T = torch.empty(len(hidden_TD), dtype=torch.float32, device=hidden_TD.device)
        entropy_T, log_total_T = torch.empty_like(logprobs_T), torch.empty_like(logprobs_T)
        for chunk in _chunks(len(hidden_TD), head.chunk_size):
            logprobs_T[chunk], entropy_T[chunk], log_total_T[chunk] = _chunk_forward(
                hidden_TD[chunk], weight_WD, labels_T[chunk], head
            )
        ctx.save_for_backward(hidden_TD, weight_WD, labels_T, log_total_T)
        ctx.head = head
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_T, _entropy_grad):
        hidden_TD, weight_WD, labels_T, log_total_T = ctx.saved_tensors
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        grad_hidden_TD = torch.empty_like(hidden_TD) if needs_hidden else None
        # float32, since a large vocabulary sums over very many chunks.
        grad_weight_WD = torch.zeros_like(weight_WD, dtype=torch.float32) if needs_weight else None
        for chunk in _chunks(len(hidden_TD), ctx.head.chunk_size):
            grad_CW = _logit_gradient(
                hidden_TD[chunk],
                weight_WD,
                labels_T[chunk],
                log_total_T[chunk],
                grad_T[chunk],
                ctx.head,
            )
            if grad_hidden_TD is not None:
                torch.mm(grad_CW, weight_WD, out=grad_hidden_TD[chunk])
            if grad_weight_WD is not None:
                _add_product(grad_weight_WD, grad_CW.T, hidden_TD[chunk])
            del grad_CW  # freed before the next chunk allocates its own
        if grad_weight_WD is not None:
            grad_weight_WD = grad_weight_WD.to(weight_WD.dtype)
        return grad_hidden_TD, grad_weight_WD, None, None


# The logits of a chunk live only within a call of one of these two functions.


def _chunk_forward(
    hidden_CD: torch.Tensor, weight_WD: torch.Tensor, labels_C: torch.Tensor, head: _Head
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log p(label), entropy and logsumexp of each row."""
    if _has_kernels(hidden_CD, head):
        from areal.engine.train.logprob_kernels import row_statistics  # needs Triton

        raw_CW = _ban(float32_logits(hidden_CD, weight_WD), head)
        stats = row_statistics(raw_CW, labels_C, head.temperature, head.softcap)
        log_total_C, label_C, mean_logit_C = stats
    else:
        raw_CW = _raw_logits(hidden_CD, weight_WD, head, head.batch_invariant)
        logits_CW = _scaled(raw_CW, head)
        log_total_C, label_C, mean_logit_C = (
            _whole_rows(logits_CW, labels_C)
            if head.part is None
            else _rows_in_parts(logits_CW, labels_C, head.part)
        )
    if head.batch_invariant:
        logprobs_C = row_logprobs(raw_CW, labels_C, head.temperature)
    else:
        logprobs_C = label_C - log_total_C
    return logprobs_C, log_total_C - mean_logit_C, log_total_C


def _logit_gradient(
    hidden_CD: torch.Tensor,
    weight_WD: torch.Tensor,
    labels_C: torch.Tensor,
    log_total_C: torch.Tensor,
    grad_C: torch.Tensor,
    head: _Head,
) -> torch.Tensor:
    """Gradient of the products with the head [C, W], in the model's dtype."""
    if _has_kernels(hidden_CD, head):
        from areal.engine.train.logprob_kernels import logit_gradient  # needs Triton

        raw_CW = _ban(float32_logits(hidden_CD, weight_WD), head)
        options = (head.temperature, head.softcap, hidden_CD.dtype)
        return logit_gradient(raw_CW, labels_C, log_total_C, grad_C, *options)
    logits_CW = _scaled(_raw_logits(hidden_CD, weight_WD, head, False), head)
    scale_C1 = grad_C[:, None] / head.temperature
    cap = head.softcap
    slope_CW = None if cap is None else _softcap_slope(logits_CW, head.temperature / cap)
    # d logp(label) / d logits = onehot(label) - softmax
    grad_CW = (logits_CW - log_total_C[:, None]).exp_().mul_(-scale_C1)
    label_C, is_here_C = _own_labels(labels_C, grad_CW.shape[1], head.part)
    grad_CW.scatter_add_(1, label_C[:, None], scale_C1 * is_here_C[:, None])
    if slope_CW is not None:
        grad_CW *= slope_CW
    return grad_CW.to(hidden_CD.dtype)


def _has_kernels(hidden_CD: torch.Tensor, head: _Head) -> bool:
    return hidden_CD.is_cuda and head.part is None and not head.batch_invariant


def _add_product(sum_WD: torch.Tensor, grad_WC: torch.Tensor, hidden_CD: torch.Tensor) -> None:
    """sum += grad @ hidden, accumulated in float32 without rounding the product."""
    if not hidden_CD.is_cuda or hidden_CD.dtype == torch.float32:
        sum_WD += grad_WC @ hidden_CD
    elif _can_add_in_place(hidden_CD.device, hidden_CD.dtype):
        torch.addmm(sum_WD, grad_WC, hidden_CD, out_dtype=torch.float32, out=sum_WD)
    else:
        sum_WD += torch.mm(grad_WC, hidden_CD, out_dtype=torch.float32)


@cache
def _can_add_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Some releases of torch refuse to add a product of 16-bit matrices to a float32 one."""
    factor, total = (
        torch.ones(16, 16, device=device, dtype=dtype),
        torch.ones(16, 16, device=device),
    )
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return bool((total == 17).all())


def _whole_rows(
    logits_CV: torch.Tensor, labels_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each row: logsumexp, the label's logit, and the mean of the logits under softmax."""
    log_total_C = logits_CV.logsumexp(dim=1)
    label_C = logits_CV.gather(1, labels_C[:, None]).squeeze(1)
    probs_CV = (logits_CV - log_total_C[:, None]).exp_()
    return log_total_C, label_C, probs_CV.mul_(logits_CV).sum(dim=1)


def _rows_in_parts(
    logits_CW: torch.Tensor, labels_C: torch.Tensor, part: VocabPart
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_whole_rows` for logits whose columns are sharded over ranks."""
    largest_C = logits_CW.amax(dim=1)
    dist.all_reduce(largest_C, dist.ReduceOp.MAX, group=part.group)
    label_C, is_here_C = _own_labels(labels_C, logits_CW.shape[1], part)
    label_logit_C = logits_CW.gather(1, label_C[:, None]).squeeze(1)
    exp_CW = (logits_CW - largest_C[:, None]).exp_()
    total_C = exp_CW.sum(dim=1)
    weighted_C = exp_CW.mul_(logits_CW).sum(dim=1)
    sums_3C = torch.stack([total_C, weighted_C, torch.where(is_here_C, label_logit_C, 0.0)])
    dist.all_reduce(sums_3C, group=part.group)
    total_C, weighted_C, label_logit_C = sums_3C
    return largest_C + total_C.log(), label_logit_C, weighted_C / total_C


def _own_labels(
    labels_C: torch.Tensor, width: int, part: VocabPart | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each label among this rank's `width`, and whether it is one of them."""
    label_C = labels_C if part is None else labels_C - part.first
    is_here_C = (label_C >= 0) & (label_C < width)
    return label_C.clamp(0, width - 1), is_here_C


def _raw_logits(
    hidden_CD: torch.Tensor, weight_WD: torch.Tensor, head: _Head, batch_invariant: bool
) -> torch.Tensor:
    """At temperature 1."""
    product = invariant_logits if batch_invariant else float32_logits
    return _ban(softcap(product(hidden_CD, weight_WD), head.softcap), head)


def _scaled(raw_CW: torch.Tensor, head: _Head) -> torch.Tensor:
    return raw_CW if head.temperature == 1.0 else _ban(raw_CW / head.temperature, head)


def _ban(logits_CW: torch.Tensor, head: _Head) -> torch.Tensor:
    """In place. Finite, so that the product with a probability of 0 is 0."""
    first = 0 if head.part is None else head.part.first
    own = [token - first for token in head.banned if 0 <= token - first < logits_CW.shape[1]]
    for column in own:
        logits_CW[:, column] = _NEVER
    return logits_CW


def _softcap_slope(logits_CW: torch.Tensor, scale: float) -> torch.Tensor:
    """d softcap(x) / dx from capped logits / temperature; times `scale` they are the tanh."""
    tanh_CW = logits_CW * scale
    return 1.0 - tanh_CW * tanh_CW


def _chunks(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
