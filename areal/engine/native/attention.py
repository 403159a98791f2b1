"""Attention over the paged cache: the `attend` back end of decoding and of prefill alike.

Every token of a forward is a row of its own: it writes its key and value into the cache, then
attends to the pages of its sequence up to its own position. A row's arithmetic has one shape, fixed
by its own length: the number of pages is rounded up by `bucket_of`, and rows of one bucket are
computed together. So its result does not depend, bit for bit, on the other rows, on whether its
sequence is being prefilled or decoded, or on how a prompt was cut into chunks (a CPU kernel
computes each (row, head) alone). The G query heads that share a key/value head stand as G query
positions. A layer with a sliding window takes only the pages its rows' windows reach.

Shapes: T rows, L layers, N query heads, K key/value heads, G = N / K, H head dim, P pages, S = P *
page_size cached positions, R rows of one bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from areal.engine.native.kv_cache import SCRATCH_PAGE

# Keys (and as many values) copied out of the cache at once: long prompts go in chunks of rows.
_MAX_GATHERED_ELEMENTS = 2**23


class KVCache:
    """Keys and values of all pages in all layers: `[L, num_pages, page_size, K, H]` each."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (num_layers, num_pages, page_size, num_kv_heads, head_dim)
        # Zeros, not empty: masked positions are multiplied by 0, which must not meet a NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.page_size = page_size

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        source, target = torch.tensor([sources, targets], device=self.keys.device)
        for cache in (self.keys, self.values):
            cache.index_copy_(1, target, cache.index_select(1, source))


@dataclass(slots=True)
class _Bucket:
    """Rows whose sequences take the same rounded number of pages."""

    rows: torch.Tensor | slice  # [R] int64, or all
    pages: torch.Tensor  # [R * P] int64, from the first that the row may look at
    bias: torch.Tensor  # [R, 1, 1, S], 0 where the row may look and -inf elsewhere


class PagedAttention:
    """One forward's `attend`. Built on the host from each row's position and page table."""

    def __init__(self, cache: KVCache, positions_T: np.ndarray, pages_TP: np.ndarray) -> None:
        """`pages_TP` int64: page of positions 0.., entries past a row's position are not used."""
        self._cache = cache
        self._device = cache.keys.device
        self._positions_T, self._pages_TP = positions_T, pages_TP
        size = cache.page_size
        self._last_page_T = positions_T // size
        written = np.take_along_axis(pages_TP, self._last_page_T[:, None], axis=1)[:, 0]
        self._write_T = self._upload(written * size + positions_T % size)
        self._buckets_of: dict[int | None, list[_Bucket]] = {}  # by window

    def __call__(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        *,
        window: int | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.flatten(0, 1).index_copy_(0, self._write_T, k_TKH)
        values.flatten(0, 1).index_copy_(0, self._write_T, v_TKH)
        if window not in self._buckets_of:
            self._buckets_of[window] = self._make_buckets(window)
        buckets = self._buckets_of[window]
        if len(buckets) == 1:
            return self._attend_bucket(buckets[0], q_TNH, keys, values, scale)
        out_TNH = torch.empty_like(q_TNH)
        for bucket in buckets:
            rows = bucket.rows
            out_TNH[rows] = self._attend_bucket(bucket, q_TNH[rows], keys, values, scale)
        return out_TNH

    def _attend_bucket(
        self,
        bucket: _Bucket,
        q_RNH: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        num_rows, _, head_dim = q_RNH.shape
        num_kv_heads = keys.shape[2]

        def gather(cache: torch.Tensor) -> torch.Tensor:  # -> [R, K, S, H]
            pages = cache.flatten(1).index_select(0, bucket.pages)
            return pages.view(num_rows, -1, num_kv_heads, head_dim).transpose(1, 2)

        out_RKGH = F.scaled_dot_product_attention(
            q_RNH.reshape(num_rows, num_kv_heads, -1, head_dim),
            gather(keys),
            gather(values),
            attn_mask=bucket.bias,
            scale=scale,
        )
        return out_RKGH.reshape(q_RNH.shape)

    def _make_buckets(self, window: int | None) -> list[_Bucket]:
        if window is None:
            first_T = np.zeros_like(self._positions_T)
        else:
            first_T = np.maximum(self._positions_T - window + 1, 0)
        bucket_T = bucket_of(self._last_page_T - first_T // self._cache.page_size + 1)
        sizes = np.unique(bucket_T).tolist()
        return [
            self._make_bucket(rows, num_pages, first_T)
            for num_pages in sizes
            for rows in self._chunks(
                num_pages, None if len(sizes) == 1 else np.flatnonzero(bucket_T == num_pages)
            )
        ]

    def _chunks(self, num_pages: int, rows: np.ndarray | None) -> list[np.ndarray | slice]:
        """The rows (None: all) of one size, in chunks that bound the memory of the gather."""
        cache, num_rows = self._cache, len(self._positions_T)
        num_positions = num_pages * cache.page_size
        elements = num_positions * cache.keys.shape[3] * cache.keys.shape[4]
        chunk = max(1, _MAX_GATHERED_ELEMENTS // elements)
        if rows is None and chunk >= num_rows:
            return [slice(None)]
        rows = np.arange(num_rows) if rows is None else rows
        return [rows[start : start + chunk] for start in range(0, len(rows), chunk)]

    def _make_bucket(
        self, rows: np.ndarray | slice, num_pages: int, first_T: np.ndarray
    ) -> _Bucket:
        """`first_T`: the first position each row may look at."""
        size = self._cache.page_size
        positions_R, first_R = self._positions_T[rows], first_T[rows]
        first_page_R = first_R // size
        column_RP = first_page_R[:, None] + np.arange(num_pages)
        width = self._pages_TP.shape[1]
        pages_RP = np.take_along_axis(
            self._pages_TP[rows], np.minimum(column_RP, width - 1), axis=1
        )
        pages_RP[column_RP >= width] = SCRATCH_PAGE
        position_RS = first_page_R[:, None] * size + np.arange(num_pages * size)
        seen_RS = (position_RS >= first_R[:, None]) & (position_RS <= positions_R[:, None])
        bias_RS = np.where(seen_RS, np.float32(0), np.float32(-np.inf))
        return _Bucket(
            rows=rows if isinstance(rows, slice) else self._upload(rows),
            pages=self._upload(np.ascontiguousarray(pages_RP).reshape(-1)),
            bias=self._upload(bias_RS)[:, None, None].to(self._cache.keys.dtype),
        )

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def bucket_of(num_pages: np.ndarray) -> np.ndarray:
    """Round up to 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...: four sizes per octave.

    At most a quarter is wasted, and rows of many lengths still make few buckets.
    """
    exponent = np.frexp(num_pages - 1)[1]  # bits of num_pages - 1
    step = 1 << np.maximum(exponent - 3, 0)
    return -(-num_pages // step) * step
