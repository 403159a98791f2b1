"""Means over the tokens, and sums, means and maxima over the sequences, of a packed micro-batch.

Packed tokens `[T]` are contiguous; sequence b is `cu_seqlens[b] : cu_seqlens[b + 1]`. Only tokens
under the mask count; values off the mask are arbitrary and reach neither the value nor the
gradient. A sequence without masked-in tokens gives 0.

Shapes: T packed tokens, B sequences.
"""

from __future__ import annotations

import torch

from areal.utils.data import sequence_ids


def token_mean(
    x_T: torch.Tensor, mask_T: torch.Tensor, credit_T: torch.Tensor | None = None
) -> torch.Tensor:
    """The mean over the mask in which a token counts `credit_T` times; None: once.

    0 for an empty mask. Values off the mask must be finite, and count as they are: mask them first.
    """
    if credit_T is None:
        return x_T.sum() / mask_T.sum().clamp(min=1)
    credit_T = credit_T.masked_fill(~mask_T.bool(), 0.0)
    total = credit_T.sum()
    return (x_T * credit_T).sum() / total.masked_fill(total == 0, 1.0)


def sequence_sum(x_T: torch.Tensor, mask_T: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    kept_T = x_T.masked_fill(~mask_T.bool(), 0.0)
    return _zeros(x_T, cu_seqlens).index_add(0, sequence_ids(cu_seqlens), kept_T)


def sequence_count(mask_T: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Tokens under the mask, as integers `[B]`."""
    ones_T = mask_T.long()
    return _zeros(ones_T, cu_seqlens).index_add(0, sequence_ids(cu_seqlens), ones_T)


def sequence_mean(
    x_T: torch.Tensor, mask_T: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    count_B = sequence_count(mask_T, cu_seqlens).clamp(min=1)
    return sequence_sum(x_T, mask_T, cu_seqlens) / count_B


def sequence_max(x_T: torch.Tensor, mask_T: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    lowest = float("-inf")
    kept_T = x_T.masked_fill(~mask_T.bool(), lowest)
    out_B = torch.full_like(_zeros(x_T, cu_seqlens), lowest)
    out_B = out_B.scatter_reduce(0, sequence_ids(cu_seqlens), kept_T, "amax")
    return out_B.masked_fill(sequence_count(mask_T, cu_seqlens) == 0, 0.0)


def spread(x_B: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Each sequence's value at each of its tokens."""
    return x_B[sequence_ids(cu_seqlens)]


def _zeros(like_T: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    return like_T.new_zeros(len(cu_seqlens) - 1)
