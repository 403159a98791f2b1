"""The tower of Gemma 3: SigLIP over images of one size, learned positions, attention within whole
images; squares of patches are averaged to one token each, normed and projected.

Shape legend: as in tower.py.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from areal.models.common.norm import ZeroCenteredNorm
from areal.models.vision.args import VisionArgs
from areal.models.vision.tower import (
    Images,
    InputProjection,
    PatchEmbedding,
    PositionTable,
    Segments,
    Sight,
    TowerAttention,
    TowerBlock,
    VisionTower,
    patch_places,
    upload,
)


class Gemma3Tower(VisionTower):
    def __init__(self, args: VisionArgs) -> None:
        super().__init__(args)
        self.patch_embed = PatchEmbedding(args, bias=True, has_time=False)
        self.pos_embed = PositionTable(args.image_side**2, args.dim)
        new_norm = partial(nn.LayerNorm, args.dim, args.norm_eps)
        self.blocks = nn.ModuleList(
            TowerBlock(new_norm, _Attention(args), _FeedForward(args)) for _ in range(args.n_layers)
        )
        self.norm = nn.LayerNorm(args.dim, args.norm_eps)
        self.soft_norm = ZeroCenteredNorm(args.dim, args.norm_eps)
        self.projection = InputProjection(args.dim, args.out_dim)

    def see(self, images: Images) -> Sight:
        args, device = self.args, images.pixels.device
        places_P2 = patch_places(images.grids, args.merge_size)
        number_P = upload(places_P2[:, 0] * args.image_side + places_P2[:, 1], device)
        whole = Segments.whole(images, args)
        x_PD = self.patch_embed(images.pixels) + self.pos_embed(number_P)
        for block in self.blocks:
            x_PD = block(x_PD, None, whole)
        # The patches of a square are neighbours.
        x_ID = self.norm(x_PD).unflatten(0, (-1, args.merge_size**2)).mean(1)
        return Sight(self.projection(self.soft_norm(x_ID)))


class _Attention(TowerAttention):
    def __init__(self, args: VisionArgs) -> None:
        super().__init__(args)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(args.dim, args.dim) for _ in range(3))

    def heads(self, x_PD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        return tuple(linear(x_PD).unflatten(-1, (self.n_heads, -1)) for linear in projections)


class _FeedForward(nn.Module):
    def __init__(self, args: VisionArgs) -> None:
        super().__init__()
        self.fc1 = nn.Linear(args.dim, args.hidden_dim)
        self.fc2 = nn.Linear(args.hidden_dim, args.dim)

    def forward(self, x_PD: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x_PD), approximate="tanh"))
