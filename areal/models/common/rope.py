"""Rotary position embedding: frequencies of each rope kind, and the rotation of queries and keys.

With M-RoPE (`args.axes`) a token has three positions, and each pair of dimensions turns with one
of them. Three equal ones are the usual rotation, so text may pass one.

Positions in, cos and sin out, for any positions: nothing is cached by length, so packing, decoding
and re-prefill use one path. Angles are float32 whatever the model's dtype.

Shape legend: T tokens, N heads, H head dim, R = H / 2 rotated pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from areal.models.common.args import RopeArgs


class RotaryEmbedding(nn.Module):
    """`cos_TR, sin_TR = rope(positions_T, dtype)`, once per forward for all layers; positions may
    be [3, T] with M-RoPE."""

    def __init__(self, args: RopeArgs, head_dim: int):
        super().__init__()
        self.args = args
        self.head_dim = head_dim
        self.cos_sin_scale = attention_scale(args)
        self.register_buffer("inv_freq_R", inverse_frequencies(args, head_dim), persistent=False)

    def _apply(self, fn, recurse=True):
        # The frequencies are derived, not learned: rebuild them after any move or cast, so that
        # `to(bfloat16)` cannot round them and `to_empty` cannot leave them undefined.
        super()._apply(fn, recurse)
        self.inv_freq_R = inverse_frequencies(self.args, self.head_dim).to(self.inv_freq_R.device)
        return self

    def forward(
        self, positions_T: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if positions_T.ndim == 2:
            axis_R = torch.tensor(self.args.axes, device=positions_T.device)
            positions_TR = positions_T.index_select(0, axis_R).T
        else:
            positions_TR = positions_T[:, None]
        angles_TR = positions_TR.to(torch.float32) * self.inv_freq_R
        cos_TR, sin_TR = angles_TR.cos(), angles_TR.sin()
        if self.cos_sin_scale != 1.0:
            cos_TR, sin_TR = cos_TR * self.cos_sin_scale, sin_TR * self.cos_sin_scale
        return cos_TR.to(dtype), sin_TR.to(dtype)


def rotate(x_TNH: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    """Rotate dimension i with dimension i + H/2 (the pairing of Hugging Face checkpoints)."""
    cos_T1R, sin_T1R = cos_TR[:, None], sin_TR[:, None]
    first_TNR, second_TNR = x_TNH.chunk(2, dim=-1)
    return torch.cat(
        (
            first_TNR * cos_T1R - second_TNR * sin_T1R,
            second_TNR * cos_T1R + first_TNR * sin_T1R,
        ),
        dim=-1,
    )


def rotate_leading(x_TNH: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    """`rotate` of the first 2 R dims; the others stay."""
    rotated = 2 * cos_TR.shape[-1]
    if rotated == x_TNH.shape[-1]:
        return rotate(x_TNH, cos_TR, sin_TR)
    turned_TNR = rotate(x_TNH[..., :rotated], cos_TR, sin_TR)
    return torch.cat((turned_TNR, x_TNH[..., rotated:]), dim=-1)


def inverse_frequencies(args: RopeArgs, head_dim: int) -> torch.Tensor:
    """Radians per position of each rotated pair, float32 [R], always on the CPU."""
    with torch.device("cpu"):
        exponent_R = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return _SCALINGS[args.kind](1.0 / args.theta**exponent_R, args)


def attention_scale(args: RopeArgs) -> float:
    """Factor on cos and sin; yarn uses it to sharpen attention over an extended context."""
    if args.kind != "yarn":
        return 1.0
    if args.attention_factor is not None:
        return args.attention_factor
    if args.mscale and args.mscale_all_dim:
        return args.yarn_scale(args.mscale) / args.yarn_scale(args.mscale_all_dim)
    return args.yarn_scale(1.0)


def _unscaled(freq_R: torch.Tensor, args: RopeArgs) -> torch.Tensor:
    return freq_R


def _linear(freq_R: torch.Tensor, args: RopeArgs) -> torch.Tensor:
    return freq_R / args.factor


def _llama3(freq_R: torch.Tensor, args: RopeArgs) -> torch.Tensor:
    """Keep fast pairs, slow the slow ones by `factor`, blend those between."""
    turns_R = args.original_max_position_embeddings * freq_R / (2 * math.pi)
    band = args.high_freq_factor - args.low_freq_factor
    keep_R = ((turns_R - args.low_freq_factor) / band).clamp(0, 1)
    return keep_R * freq_R + (1 - keep_R) * freq_R / args.factor


def _yarn(freq_R: torch.Tensor, args: RopeArgs) -> torch.Tensor:
    """As llama3, but the blend is linear in the pair's index instead of in its rotations."""
    head_dim = 2 * len(freq_R)

    def index_of(turns: float) -> float:
        wavelength = args.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(args.theta))

    low, high = index_of(args.beta_fast), index_of(args.beta_slow)
    if args.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001  # equal ends: a step instead of a ramp
    slow_R = ((torch.arange(len(freq_R), dtype=torch.float32) - low) / width).clamp(0, 1)
    return (1 - slow_R) * freq_R + slow_R * freq_R / args.factor


_SCALINGS: dict[str, Callable[[torch.Tensor, RopeArgs], torch.Tensor]] = {
    "default": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
