"""SwiGLU feed-forward: `w2(silu(w1(x)) * w3(x))`, D -> F -> D."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from areal.models.common.args import DecoderArgs


class FeedForward(nn.Module):
    def __init__(self, args: DecoderArgs):
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.hidden_dim, bias=args.mlp_bias)
        self.w2 = nn.Linear(args.hidden_dim, args.dim, bias=args.mlp_bias)
        self.w3 = nn.Linear(args.dim, args.hidden_dim, bias=args.mlp_bias)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x_TD)) * self.w3(x_TD))
