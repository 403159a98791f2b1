"""Grouped-query attention without the attention itself: projections, QK norm, rotation.

    out_TNH = attend(attention.layer, *attention.heads(x_TD, cos_TR, sin_TR), ...)
    x_TD += attention.wo(out_TNH.flatten(1))         # the block's part: see decoder.py

The scores and the weighted sum belong to `attend`, a callable the caller gives: packed sequences in
training, a paged cache in decoding. So both run the same weights through the same code up to there.

Shape legend: T tokens, D model dim, N query heads, K key-value heads, H head dim, R = H / 2.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from areal.models.common.args import DecoderArgs
from areal.models.common.rope import rotate


class Attend(Protocol):
    """An attention back end: causal attention of T new tokens."""

    def __call__(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        /,
        *,
        window: int | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Return [T, N, H]; keys come rotated, ready to be cached.

        window: how many tokens each one sees, itself and those just before it (None: all before).
        scale: what scores are multiplied with (None: H ** -0.5).
        """
        ...


class Attention(nn.Module):
    def __init__(self, args: DecoderArgs, layer: int, norm_class: type[nn.RMSNorm] = nn.RMSNorm):
        super().__init__()
        self.layer = layer
        self.window = args.window(layer)
        self.scale = args.score_scale
        self.head_dim = args.head_dim
        q_dim, kv_dim = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
        self.wq = nn.Linear(args.dim, q_dim, bias=args.qkv_bias)
        self.wk = nn.Linear(args.dim, kv_dim, bias=args.qkv_bias)
        self.wv = nn.Linear(args.dim, kv_dim, bias=args.qkv_bias)
        self.wo = nn.Linear(q_dim, args.dim, bias=args.attention_out_bias)
        self.q_norm = norm_class(args.head_dim, args.norm_eps) if args.qk_norm else None
        self.k_norm = norm_class(args.head_dim, args.norm_eps) if args.qk_norm else None

    def heads(
        self, x_TD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, N, H], keys and values [T, K, H]; the first two rotated."""
        q_TNH = self.wq(x_TD).unflatten(-1, (-1, self.head_dim))
        k_TKH = self.wk(x_TD).unflatten(-1, (-1, self.head_dim))
        v_TKH = self.wv(x_TD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_TNH, k_TKH = self.q_norm(q_TNH), self.k_norm(k_TKH)
        return rotate(q_TNH, cos_TR, sin_TR), rotate(k_TKH, cos_TR, sin_TR), v_TKH
