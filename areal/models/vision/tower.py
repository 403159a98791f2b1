"""What towers share: their inputs and outputs, attention within images, rotation by row and column.

    sight = tower(images)          # or model.look(images)
    hidden_TD = model(tokens_T, positions_3T, attend, sight, sight_rows_I)

Patches lie in merge order: those that become one token are neighbours, in blocks from left to right
and top to bottom, as image processors cut them.

Shape legend: P patches of all images, I image tokens (P / merge_size ** 2), N images, D model dim
of the tower or, in a `Sight`, of the decoder, A heads, H head dim, R = H / 2.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from areal.models.common.rope import rotate
from areal.models.vision.args import VisionArgs


@dataclass(frozen=True, slots=True)
class Images:
    """Images of one or several sequences, in the order of their tokens."""

    pixels: torch.Tensor  # [P, args.patch_values], normalised
    grids: torch.Tensor  # [N, 3] int: patches in time, height and width

    @classmethod
    def concat(cls, several: Sequence[Images]) -> Images:
        return cls(torch.cat([x.pixels for x in several]), torch.cat([x.grids for x in several]))

    @classmethod
    def blank(cls, args: VisionArgs, device: torch.device) -> Images:
        """The smallest image there is."""
        grid = args.whole_grid
        pixels = torch.zeros(args.num_patches(grid), args.patch_values, device=device)
        return cls(pixels, torch.tensor([grid]))

    def check(self, args: VisionArgs) -> None:
        """ValueError unless pixels and grids belong together."""
        if self.grids.ndim != 2 or self.grids.shape[1] != 3:
            raise ValueError(f"image_grid_thw has shape {list(self.grids.shape)}, expected [N, 3]")
        for grid in self.grids.tolist():
            args.check_grid(grid)
        expected = [sum(map(args.num_patches, self.grids.tolist())), args.patch_values]
        if list(self.pixels.shape) != expected:
            raise ValueError(
                f"pixel_values has shape {list(self.pixels.shape)}, expected {expected} for "
                "image_grid_thw and this model's patches"
            )
        if not bool(self.pixels.isfinite().all()):
            raise ValueError("pixel_values has values that are not finite")


@dataclass(frozen=True, slots=True)
class Sight:
    """What a tower makes of images, or a slice of it: `sight[start:end]`."""

    tokens_ID: torch.Tensor  # the embedding of each image token
    deepstack: tuple[torch.Tensor, ...] = ()  # [I, D] each, added after the decoder's first layers

    def __len__(self) -> int:
        return len(self.tokens_ID)

    def take(self, index_I: torch.Tensor) -> Sight:
        """The embeddings of these places, in this order; one may be taken several times."""
        layers = tuple(x_ID.index_select(0, index_I) for x_ID in self.deepstack)
        return Sight(self.tokens_ID.index_select(0, index_I), layers)

    def __getitem__(self, part: slice) -> Sight:
        return Sight(self.tokens_ID[part], tuple(x_ID[part] for x_ID in self.deepstack))

    @classmethod
    def concat(cls, several: Sequence[Sight]) -> Sight:
        layers = zip(*(sight.deepstack for sight in several), strict=True)
        tokens_ID = torch.cat([sight.tokens_ID for sight in several])
        return cls(tokens_ID, tuple(torch.cat(layer) for layer in layers))


class VisionTower(nn.Module):
    blocks: nn.ModuleList  # the units of sharding and of recomputation

    def __init__(self, args: VisionArgs) -> None:
        super().__init__()
        self.args = args
        # Each image by itself, so that its bits do not depend on others.
        self.one_by_one = False

    def forward(self, images: Images) -> Sight:
        if not self.one_by_one or len(images.grids) == 1:
            return self.see(images)
        counts = [self.args.num_patches(grid) for grid in images.grids.tolist()]
        parts = zip(images.pixels.split(counts), images.grids.split(1), strict=True)
        return Sight.concat([self.see(Images(pixels, grids)) for pixels, grids in parts])

    @abstractmethod
    def see(self, images: Images) -> Sight: ...


class PatchEmbedding(nn.Module):
    """A convolution whose kernel is a patch, hence a matrix product; keeps the kernel's shape."""

    def __init__(self, args: VisionArgs, *, bias: bool, has_time: bool = True) -> None:
        super().__init__()
        frames = (args.temporal_patch_size,) if has_time else ()
        shape = (args.dim, args.in_channels, *frames, args.patch_size, args.patch_size)
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(args.dim)) if bias else None

    def forward(self, pixels_PV: torch.Tensor) -> torch.Tensor:
        return F.linear(pixels_PV.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class PositionTable(nn.Embedding):
    """Learned positions of patches."""

    def reset_parameters(self) -> None:
        """Weights are loaded, or drawn later: see TokenEmbedding."""


class InputProjection(nn.Module):
    """A matrix [in, out], as Gemma's checkpoints have it."""

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, out_dim))
        self.bias = None

    def forward(self, x_ID: torch.Tensor) -> torch.Tensor:
        return x_ID @ self.weight


class TowerBlock(nn.Module):
    """Norm, attention, norm, feed-forward.

    The computations before and after attention are two functions of tensors only, so that each can
    be compiled (models/parallelize.py).
    """

    def __init__(
        self, new_norm: Callable[[], nn.Module], attn: TowerAttention, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = new_norm(), new_norm()
        self.attn, self.mlp = attn, mlp

    def forward(
        self, x_PD: torch.Tensor, rotation: Rotation | None, segments: Segments
    ) -> torch.Tensor:
        cos_sin = () if rotation is None else (rotation.cos_PR, rotation.sin_PR)
        q_PAH, k_PAH, v_PAH = self.before(x_PD, *cos_sin)
        return self.after(x_PD, segments.attend(q_PAH, k_PAH, v_PAH))

    def before(
        self, x_PD: torch.Tensor, *cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The queries, keys and values to attend with, rotated if angles are given."""
        q_PAH, k_PAH, v_PAH = self.attn.heads(self.norm1(x_PD))
        if cos_sin:  # in float32, as transformers does
            q_PAH, k_PAH = (rotate(x.float(), *cos_sin).to(x.dtype) for x in (q_PAH, k_PAH))
        return q_PAH, k_PAH, v_PAH

    def after(self, x_PD: torch.Tensor, out_PAH: torch.Tensor) -> torch.Tensor:
        """The block's output from its input and the output of attention."""
        x_PD = x_PD + self.attn.proj(out_PAH.flatten(1))
        return x_PD + self.mlp(self.norm2(x_PD))


class TowerAttention(nn.Module):
    """The projections of attention."""

    def __init__(self, args: VisionArgs) -> None:
        super().__init__()
        self.n_heads = args.n_heads
        self.proj = nn.Linear(args.dim, args.dim)

    @abstractmethod
    def heads(self, x_PD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values [P, A, H]."""


class FusedAttention(TowerAttention):
    """One matrix for queries, keys and values."""

    def __init__(self, args: VisionArgs) -> None:
        super().__init__(args)
        self.qkv = nn.Linear(args.dim, 3 * args.dim)

    def heads(self, x_PD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.qkv(x_PD).unflatten(-1, (3, self.n_heads, -1)).unbind(1)


class Segments:
    """Attention of all patches of a segment (an image or a window) to each other.

    Segments of one length are computed as one batch; on a GPU with 16 bits, different lengths by
    the kernel for packed sequences. What depends on the lengths alone is made once, for all layers.
    """

    def __init__(self, lengths: Iterable[int], device: torch.device) -> None:
        self._lengths = np.fromiter(lengths, np.int64)
        self._sizes = np.unique(self._lengths)
        self._device = device

    @classmethod
    def whole(cls, images: Images, args: VisionArgs) -> Segments:
        """Each image is one."""
        counts = map(args.num_patches, images.grids.tolist())
        return cls(counts, images.pixels.device)

    def attend(self, q_PAH: torch.Tensor, k_PAH: torch.Tensor, v_PAH: torch.Tensor) -> torch.Tensor:
        if len(self._sizes) == 1:
            return _attend_all(q_PAH, k_PAH, v_PAH, int(self._sizes[0]))
        if q_PAH.is_cuda and q_PAH.dtype in (torch.bfloat16, torch.float16):
            return self._by_packed_kernel(q_PAH, k_PAH, v_PAH)
        batches, back = self._batches
        outputs = []
        for size, index in batches:
            q, k, v = (x.index_select(0, index) for x in (q_PAH, k_PAH, v_PAH))
            outputs.append(_attend_all(q, k, v, size))
        return torch.cat(outputs).index_select(0, back)

    @cached_property
    def _batches(self) -> tuple[list[tuple[int, torch.Tensor]], torch.Tensor]:
        """Each length with the patches of its segments, and the way back from their order."""
        starts = self._lengths.cumsum() - self._lengths
        batches, order = [], []
        for size in self._sizes.tolist():
            places = (starts[self._lengths == size][:, None] + np.arange(size)).ravel()
            batches.append((size, upload(places, self._device)))
            order.append(places)
        return batches, upload(np.argsort(np.concatenate(order)), self._device)

    @cached_property
    def _bounds(self) -> torch.Tensor:
        return upload(np.append(0, self._lengths.cumsum()).astype(np.int32), self._device)

    def _by_packed_kernel(
        self, q_PAH: torch.Tensor, k_PAH: torch.Tensor, v_PAH: torch.Tensor
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn  # importing it registers operators

        longest = int(self._sizes[-1])
        names = inspect.signature(varlen_attn).parameters
        everything: dict[str, Any] = {"window_size": (-1, -1)} if "window_size" in names else {}
        q, k, v = (x.contiguous() for x in (q_PAH, k_PAH, v_PAH))
        bounds = self._bounds
        out = varlen_attn(q, k, v, bounds, bounds, longest, longest, **everything)
        return cast(torch.Tensor, out)  # no tuple: no log-sum-exp was requested


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """To a GPU by pinned memory: an ordinary copy would wait for all work launched before it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _attend_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: int) -> torch.Tensor:
    q_BASH, k_BASH, v_BASH = (x.unflatten(0, (-1, size)).transpose(1, 2) for x in (q, k, v))
    out_BASH = F.scaled_dot_product_attention(q_BASH, k_BASH, v_BASH)
    return out_BASH.transpose(1, 2).flatten(0, 1)


def patch_places(grids: torch.Tensor, merge_size: int) -> np.ndarray:
    """[P, 2]: row and column of each patch in its image, in merge order."""
    places = []
    for _, height, width in grids.tolist():
        place = np.indices((height, width)).transpose(1, 2, 0)
        blocks = place.reshape(
            height // merge_size, merge_size, width // merge_size, merge_size, 2
        ).swapaxes(1, 2)
        places.append(blocks.reshape(-1, 2))
    return np.concatenate(places)


@dataclass(frozen=True, slots=True)
class Rotation:
    """By row and column. No tuple: FSDP would round it to the dtype of the blocks it is given to,
    and transformers rotates in float32."""

    cos_PR: torch.Tensor
    sin_PR: torch.Tensor


def patch_rotation(places_P2: np.ndarray, args: VisionArgs, device: torch.device) -> Rotation:
    """Half of the pairs turn with the row, half with the column."""
    assert args.rope_theta is not None, "only towers that rotate ask for it"
    head_dim = args.dim // args.n_heads
    exponent = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
    frequency = (1.0 / args.rope_theta**exponent).numpy()
    angles_P2F = places_P2.astype(np.float32)[:, :, None] * frequency
    angles_PR = upload(angles_P2F.reshape(len(places_P2), -1), device)
    return Rotation(angles_PR.cos(), angles_PR.sin())
