"""Keys and values of all pages on the device, and the experts of every position if there are some.

A layer with attention has `[num_pages, K, page_size, H]` of each. A (page, head) is contiguous, so
a kernel that reads one head of a sequence reads whole pages. An FP8 cache has a scale for every
token and head. Of latent attention it has one vector per token and layer in their place
(latent_attention.py).
"""

from __future__ import annotations

import torch

from areal.engine.native.cuda.fp8_tensors import CacheScales
from areal.engine.native.expert_cache import ExpertCache
from areal.models.common.decoder import Decoder
from areal.models.common.fp8 import FP8


class PagedCache:
    def __init__(self, model: Decoder, *, num_pages: int, page_size: int) -> None:
        args = model.args
        self._row_of = {layer: row for row, layer in enumerate(args.attention_layers)}
        parts, num_heads, width = 2, args.n_kv_heads, args.head_dim
        if args.latent is not None:
            parts, num_heads, width = 1, 1, args.latent.cached_dim
        shape = (len(self._row_of), parts, num_pages, num_heads, page_size, width)
        # Zeros: a masked position is multiplied by 0, and 0 * NaN is NaN.
        weight = model.embedding_weight
        is_fp8 = model.has_fp8_cache
        self._cache = weight.new_zeros(shape, dtype=FP8 if is_fp8 else weight.dtype)
        assert not (is_fp8 and args.latent), "the model refuses it"
        # By layer, keys or values, page, head and token.
        self._scales = weight.new_zeros(shape[:-1], dtype=torch.float32) if is_fp8 else None
        self.page_size = page_size
        self.experts = args.moe and ExpertCache(
            args.moe, num_pages=num_pages, page_size=page_size, device=weight.device
        )

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._cache[self._row_of[layer]]
        return keys, values

    def latents(self, layer: int) -> torch.Tensor:
        """`[num_pages, page_size, X]` of latent attention."""
        return self._cache[self._row_of[layer], 0, :, 0]

    @property
    def token_bytes(self) -> int:
        """In all layers."""
        parts = [self._cache] if self._scales is None else [self._cache, self._scales]
        return sum(part.nbytes for part in parts) // (self._cache.shape[2] * self.page_size)

    def scales(self, layer: int) -> CacheScales | None:
        """Of an FP8 cache."""
        return None if self._scales is None else CacheScales(*self._scales[self._row_of[layer]])

    def copy_pages(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy pages `sources` to pages `targets`, in all layers."""
        parts = [self._cache]
        if self._scales is not None:
            parts = [self._cache.view(torch.uint8), self._scales]  # torch indexes no FP8
        for part in parts:
            part.index_copy_(2, targets, part.index_select(2, sources))
        if self.experts is not None:
            self.experts.copy_pages(sources, targets)
