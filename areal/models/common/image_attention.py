"""Attention in which the tokens of an image see all of it, besides what lies before it.

Causal attention computes all tokens (any back end); then the tokens of images are computed once
more, each image by itself with the keys up to its end. With a window a token still sees nothing
that lies `window` tokens or more before it, but all of its image behind it, as transformers has it.

Shape legend: as in attention.py; I image tokens among T.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from areal.models.common.attention import Attend, AttentionSpec, shares_heads


class ImageAttention:
    """`attend` for packed sequences. `blocks`: where the sequence of an image starts, and where the
    image starts and ends."""

    def __init__(self, causal: Attend, blocks: Sequence[tuple[int, int, int]]) -> None:
        self._causal, self._blocks = causal, blocks

    def __call__(
        self, spec: AttentionSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> torch.Tensor:
        out_TNH = self._causal(spec, q_TNH, k_TKH, v_TKH)
        window = spec.window
        pieces, done = [], 0
        for first, start, end in self._blocks:
            if window is not None:
                first = max(first, start - window + 1)
            pieces.append(out_TNH[done:start])
            q_INH, k_SKH, v_SKH = q_TNH[start:end], k_TKH[first:end], v_TKH[first:end]
            mask_IS = None
            if window is not None and end - window > first:
                device = q_TNH.device
                seen_from_I = torch.arange(start - window + 1, end - window + 1, device=device)
                mask_IS = torch.arange(first, end, device=device) >= seen_from_I[:, None]
            pieces.append(_attend(q_INH, k_SKH, v_SKH, mask_IS, spec.scale))
            done = end
        return torch.cat([*pieces, out_TNH[done:]])


def _attend(
    q_INH: torch.Tensor,
    k_SKH: torch.Tensor,
    v_SKH: torch.Tensor,
    mask_IS: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    q_BNIH, k_BKSH, v_BKSH = (x.transpose(0, 1)[None] for x in (q_INH, k_SKH, v_SKH))
    out_BNIH = F.scaled_dot_product_attention(
        q_BNIH, k_BKSH, v_BKSH, attn_mask=mask_IS, scale=scale,
        enable_gqa=shares_heads(q_BNIH, k_BKSH),
    )  # fmt: skip
    return out_BNIH[0].transpose(0, 1)
