"""The tower of Qwen3-VL: learned positions, resampled to each image, attention within whole images,
and outputs of some layers (deepstack) that the decoder adds to its first layers.

Shape legend: as in tower.py.
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
    PositionTable,
    Segments,
    Sight,
    TowerBlock,
    VisionTower,
    patch_places,
    patch_rotation,
    upload,
)


class Qwen3VLTower(VisionTower):
    def __init__(self, args: VisionArgs) -> None:
        super().__init__(args)
        self.patch_embed = PatchEmbedding(args, bias=True)
        self.pos_embed = PositionTable(args.position_side**2, args.dim)
        new_norm = partial(nn.LayerNorm, args.dim, args.norm_eps)
        self.blocks = nn.ModuleList(
            TowerBlock(new_norm, FusedAttention(args), _FeedForward(args))
            for _ in range(args.n_layers)
        )
        self.merger = _Merger(args, joins_first=False)
        self.deepstack_mergers = nn.ModuleList(
            _Merger(args, joins_first=True) for _ in args.deepstack_layers
        )

    def see(self, images: Images) -> Sight:
        args, device = self.args, images.pixels.device
        places_P2 = patch_places(images.grids, args.merge_size)
        rotation = patch_rotation(places_P2, args, device)
        whole = Segments.whole(images, args)
        x_PD = self.patch_embed(images.pixels)
        x_PD = x_PD + self._positions(places_P2, images.grids, device).to(x_PD.dtype)
        deepstack = []
        for layer, block in enumerate(self.blocks):
            x_PD = block(x_PD, rotation, whole)
            if layer in args.deepstack_layers:
                merger = self.deepstack_mergers[args.deepstack_layers.index(layer)]
                deepstack.append(merger(x_PD))
        return Sight(self.merger(x_PD), tuple(deepstack))

    def _positions(
        self, places_P2: np.ndarray, grids: torch.Tensor, device: torch.device
    ) -> torch.Tensor:
        """[P, D]: the table stretched to each image, corner to corner, bilinearly."""
        index_P4, weight_P4 = resampled(places_P2, grids, self.args.position_side)
        table_P4D = self.pos_embed(upload(index_P4, device))
        return (table_P4D * upload(weight_P4, device)[:, :, None]).sum(1)


class _FeedForward(nn.Module):
    def __init__(self, args: VisionArgs) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(args.dim, args.hidden_dim)
        self.linear_fc2 = nn.Linear(args.hidden_dim, args.dim)

    def forward(self, x_PD: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x_PD), approximate="tanh"))


class _Merger(nn.Module):
    """One embedding of the decoder from neighbouring patches, normed before or after joining."""

    def __init__(self, args: VisionArgs, *, joins_first: bool) -> None:
        super().__init__()
        self.joins_first = joins_first
        self.joined_dim = args.dim * args.merge_size**2
        self.norm = nn.LayerNorm(self.joined_dim if joins_first else args.dim, args.norm_eps)
        self.linear_fc1 = nn.Linear(self.joined_dim, self.joined_dim)
        self.linear_fc2 = nn.Linear(self.joined_dim, args.out_dim)

    def forward(self, x_PD: torch.Tensor) -> torch.Tensor:
        if self.joins_first:
            x_ID = self.norm(x_PD.reshape(-1, self.joined_dim))
        else:
            x_ID = self.norm(x_PD).reshape(-1, self.joined_dim)
        return self.linear_fc2(F.gelu(self.linear_fc1(x_ID)))


def resampled(
    places_P2: np.ndarray, grids: torch.Tensor, side: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each patch the four entries of a `side` x `side` table around it, and their weights."""
    counts = grids.prod(1).tolist()
    last_P2 = np.repeat(np.maximum(grids[:, 1:].numpy() - 1, 1), counts, axis=0)
    # In float32, as transformers does: a weight near 0 or 1 depends on the rounding.
    place_P2 = places_P2.astype(np.float32) * np.float32(side - 1) / last_P2.astype(np.float32)
    low_P2 = np.floor(place_P2).astype(np.int64)
    high_P2 = np.minimum(low_P2 + 1, side - 1)
    part_P2 = place_P2 - low_P2
    rows = ((low_P2[:, 0], 1 - part_P2[:, 0]), (high_P2[:, 0], part_P2[:, 0]))
    columns = ((low_P2[:, 1], 1 - part_P2[:, 1]), (high_P2[:, 1], part_P2[:, 1]))
    corners = [(row, column) for row in rows for column in columns]
    index_P4 = np.stack([row * side + column for (row, _), (column, _) in corners], axis=1)
    weight_P4 = np.stack([by_row * by_column for (_, by_row), (_, by_column) in corners], axis=1)
    return index_P4, weight_P4.astype(np.float32)
