"""Gated feed-forward: `w2(activation(w1(x)) * w3(x))`, D -> F -> D. SwiGLU with silu."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from areal.models.common.args import DecoderArgs

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class FeedForward(nn.Module):
    def __init__(self, args: DecoderArgs):
        super().__init__()
        self.activation = ACTIVATIONS[args.activation]
        self.w1 = nn.Linear(args.dim, args.hidden_dim, bias=args.mlp_bias)
        self.w2 = nn.Linear(args.hidden_dim, args.dim, bias=args.mlp_bias)
        self.w3 = nn.Linear(args.dim, args.hidden_dim, bias=args.mlp_bias)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.w2(self.activation(self.w1(x_TD)) * self.w3(x_TD))
