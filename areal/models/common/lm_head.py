"""Logits in float32, from hidden states and the LM head in the model's dtype.

A sum rounded to bfloat16 would cost a log-probability two of its digits, so the matrix product
itself writes float32 where the device can. Training and decoding both call this.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def softcap(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Squeezed into (-cap, cap) by a tanh; None leaves them as they are."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def float32_logits(hidden_TD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    if weight_VD.is_cuda and weight_VD.dtype != torch.float32:
        return torch.mm(hidden_TD, weight_VD.t(), out_dtype=torch.float32)
    return F.linear(hidden_TD, weight_VD).float()
