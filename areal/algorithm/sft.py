"""Supervised fine-tuning: mean cross-entropy of the tokens under the loss mask."""

from __future__ import annotations

import torch


def sft_loss(logprobs_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """`mask_T` is aligned to predictions: True at t when the token at t + 1 is to be learned."""
    mask_T = mask_T.bool()
    return -logprobs_T.masked_fill(~mask_T, 0.0).sum() / mask_T.sum().clamp(min=1)
