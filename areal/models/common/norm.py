"""The RMS norms of decoders: torch's, and one whose weight is an offset from 1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from areal.models.common.args import DecoderArgs


def make_norm(args: DecoderArgs, dim: int) -> nn.RMSNorm:
    norm_class = ZeroCenteredNorm if args.zero_centered_norms else nn.RMSNorm
    return norm_class(dim, args.norm_eps)


class ZeroCenteredNorm(nn.RMSNorm):
    """RMS norm times 1 + weight, in float32."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, scale, self.eps).to(x.dtype)
