"""Keys and values on the device: `[num_pages, K, page_size, H]` per layer.

A (page, head) is contiguous, so a kernel that reads one head of a sequence reads whole pages.
"""

from __future__ import annotations

import torch


class PagedCache:
    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, num_pages, num_kv_heads, page_size, head_dim)
        # Zeros: a masked position is multiplied by 0, which must not meet a NaN.
        self._cache = torch.zeros(shape, dtype=dtype, device=device)
        self.page_size = page_size

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._cache[layer]
        return keys, values

    def copy_pages(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Pages `sources` to pages `targets`, in all layers."""
        self._cache.index_copy_(2, targets, self._cache.index_select(2, sources))
