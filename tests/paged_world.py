"""A paged cache of random sequences, and attention over it done plainly in float64.

Pages are scattered. All that no sequence wrote (tails of pages, free pages, most of the scratch
page) is NaN, so that a kernel which reads it and lets it count gives itself away.

Shapes: S sequences, P pages each, K key/value heads, G query heads of each, H head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PagedWorld:
    keys: torch.Tensor  # [num_pages, K, page_size, H]
    values: torch.Tensor
    table_SP: torch.Tensor  # int32, unused entries 0

    def dense(self, sequence: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first `length` positions: [K, length, H] each, float64."""
        pages = self.table_SP[sequence].long()
        return tuple(
            cache[pages].transpose(0, 1).flatten(1, 2)[:, :length].double()
            for cache in (self.keys, self.values)
        )

    def attend(
        self,
        q_NH: torch.Tensor,
        sequence: int,
        length: int,
        window: int | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """[N, H] float64: what one row that sees `length` positions, or the last `window` of them,
        must give."""
        keys, values = self.dense(sequence, length)
        if window is not None:
            keys, values = keys[:, -window:], values[:, -window:]
        q_KGH = q_NH.double().unflatten(0, (len(keys), -1))
        scores = q_KGH @ keys.transpose(1, 2) * (scale or q_NH.shape[1] ** -0.5)
        return (scores.softmax(-1) @ values).flatten(0, 1)


def make_paged_world(
    lengths: Sequence[int],
    *,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    shared_pages: int = 0,
    seed: int = 0,
) -> PagedWorld:
    """Sequences of these lengths, then a scratch sequence of one token in page 0.

    The first `shared_pages` pages of all sequences are the same, as for samples of one prompt.
    """
    random = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length in lengths]
    num_pages = 3 + sum(counts)
    free = (1 + torch.randperm(num_pages - 1, generator=random)).tolist()
    shared = [free.pop() for _ in range(shared_pages)]
    table = torch.zeros(len(lengths) + 1, max(counts), dtype=torch.int32)
    caches = torch.full((2, num_pages, num_kv_heads, page_size, head_dim), float("nan"))
    for sequence, (length, count) in enumerate(zip((*lengths, 1), (*counts, 1), strict=True)):
        own = count - shared_pages
        pages = [0] if sequence == len(lengths) else shared + [free.pop() for _ in range(own)]
        table[sequence, :count] = torch.tensor(pages)
        position = torch.arange(length)
        page = torch.tensor(pages)[position // page_size]
        fresh = torch.randn(length, 2, num_kv_heads, head_dim, generator=random)
        caches[:, page, :, position % page_size] = fresh
    keys, values = caches.to(device=device, dtype=dtype)
    return PagedWorld(keys, values, table.to(device))


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of the worst row: |found - wanted| / |wanted| over all but the first dimension."""
    found, wanted = found.double().flatten(1), wanted.double().flatten(1)
    return ((found - wanted).norm(dim=1) / wanted.norm(dim=1)).max().item()
