"""The Gemma 3 decoder (text): norms before and after attention and feed-forward, scaled by 1 + w.

Shape legend: T tokens, D model dim, N heads, H head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from areal.models.common.args import DecoderArgs
from areal.models.common.decoder import Decoder, DecoderBlock
from areal.models.gemma3.state_dict_adapter import Gemma3StateDictAdapter


class Gemma3Norm(nn.RMSNorm):
    """RMS norm times 1 + weight, all of it in float32."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, scale, self.eps).to(x.dtype)


class Gemma3Block(DecoderBlock):
    norm_class = Gemma3Norm

    def __init__(self, args: DecoderArgs, layer: int):
        super().__init__(args, layer)
        self.attention_out_norm = Gemma3Norm(args.dim, args.norm_eps)
        self.ffn_out_norm = Gemma3Norm(args.dim, args.norm_eps)

    def after(self, x_TD: torch.Tensor, out_TNH: torch.Tensor) -> torch.Tensor:
        x_TD = x_TD + self.attention_out_norm(self.attention.wo(out_TNH.flatten(1)))
        return x_TD + self.ffn_out_norm(self.feed_forward(self.ffn_norm(x_TD)))


class Gemma3Model(Decoder):
    adapter_class = Gemma3StateDictAdapter
    block_class = Gemma3Block
