"""The tower of Qwen2.5-VL: most layers attend within windows of the image, some within all of it.

Patches are sorted by window once, on entry, and the merged ones sorted back at the end; windows
are whole numbers of merged patches, so that merging does not mix them.

Shape legend: as in tower.py; M = I merged patches.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from areal.models.vision.args import VisionArgs
from areal.models.vision.tower import (
    FusedAttention,
    Images,
    PatchEmbedding,
    Segments,
    Sight,
    TowerBlock,
    VisionTower,
    patch_places,
    patch_rotation,
    upload,
)


class Qwen2_5VLTower(VisionTower):
    def __init__(self, args: VisionArgs) -> None:
        super().__init__(args)
        self.patch_embed = PatchEmbedding(args, bias=False)
        new_norm = partial(nn.RMSNorm, args.dim, args.norm_eps)
        self.blocks = nn.ModuleList(
            TowerBlock(new_norm, FusedAttention(args), _FeedForward(args))
            for _ in range(args.n_layers)
        )
        self.merger = _Merger(args)

    def see(self, images: Images) -> Sight:
        args, device = self.args, images.pixels.device
        order_M, window_lengths = sorted_by_window(images.grids, args)
        order_P = _of_patches(order_M, args)
        places_P2 = patch_places(images.grids, args.merge_size)[order_P]
        rotation = patch_rotation(places_P2, args, device)
        windows = Segments(window_lengths, device)
        whole = Segments.whole(images, args)
        x_PD = self.patch_embed(images.pixels.index_select(0, upload(order_P, device)))
        for layer, block in enumerate(self.blocks):
            x_PD = block(x_PD, rotation, whole if layer in args.full_layers else windows)
        back = upload(np.argsort(order_M), device)
        return Sight(self.merger(x_PD).index_select(0, back))


class _FeedForward(nn.Module):
    def __init__(self, args: VisionArgs) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(args.dim, args.hidden_dim)
        self.up_proj = nn.Linear(args.dim, args.hidden_dim)
        self.down_proj = nn.Linear(args.hidden_dim, args.dim)

    def forward(self, x_PD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_PD)) * self.up_proj(x_PD))


class _Merger(nn.Module):
    def __init__(self, args: VisionArgs) -> None:
        super().__init__()
        self.joined_dim = args.dim * args.merge_size**2
        self.ln_q = nn.RMSNorm(args.dim, args.norm_eps)
        self.mlp = nn.Sequential(
            nn.Linear(self.joined_dim, self.joined_dim),
            nn.GELU(),
            nn.Linear(self.joined_dim, args.out_dim),
        )

    def forward(self, x_PD: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.ln_q(x_PD).reshape(-1, self.joined_dim))


def sorted_by_window(grids: torch.Tensor, args: VisionArgs) -> tuple[np.ndarray, list[int]]:
    """Indices of all merged patches, window by window, and the patches in each window."""
    order, lengths, first = [], [], 0
    for _, height, width in grids.tolist():
        rows, columns = height // args.merge_size, width // args.merge_size
        row, column = np.divmod(np.arange(rows * columns), columns)
        windows_per_row = -(-columns // args.window)
        window_M = row // args.window * windows_per_row + column // args.window
        order.append(first + np.argsort(window_M, kind="stable"))
        lengths += (np.bincount(window_M) * args.merge_size**2).tolist()
        first += rows * columns
    return np.concatenate(order), lengths


def _of_patches(order_M: np.ndarray, args: VisionArgs) -> np.ndarray:
    patches = args.merge_size**2
    return (order_M[:, None] * patches + np.arange(patches)).ravel()
