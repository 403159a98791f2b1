"""Batch-invariant attention over packed tokens: training and scoring get the bits of decoding.

Keys and values are laid out in pages like the native engine's cache, and each row attends as a
decoded row does: by `rows_attention` on a GPU, by `PagedAttention` on a CPU, where pages of another
size than the engine's may change the bits. Gradients are those of PackedAttention.

Shape legend: T packed tokens, C sequences, P pages, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from areal.models.common.attention import AttentionSpec, PackedAttention
from areal.models.common.invariant import with_gradients_of

if TYPE_CHECKING:
    from areal.engine.native.torch_runner import PagedAttention

_PAGE = 16
_ANY = 0  # layer


class InvariantPackedAttention(PackedAttention):
    def __init__(self, cu_seqlens: torch.Tensor, max_seqlen: int) -> None:
        super().__init__(cu_seqlens, max_seqlen)
        self._by_pages: PagedAttention | None = None  # of a CPU, made for the first layer
        device = cu_seqlens.device
        lengths = cu_seqlens.long().diff()
        pages_C = -(-lengths // _PAGE)
        first_page_C = 1 + pages_C.cumsum(0) - pages_C  # page 0 stays scratch, as in the cache
        self._chunk_T = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
        self._page_T = first_page_C[self._chunk_T] + self.positions_T // _PAGE
        self._num_pages = 1 + int(pages_C.sum())
        columns = torch.arange(int(pages_C.max()), device=device)
        inside = columns < pages_C[:, None]
        self._pages_CP = torch.where(inside, first_page_C[:, None] + columns, 0).int()

    def __call__(
        self, spec: AttentionSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> torch.Tensor:
        by_rows = self._by_rows if q_TNH.is_cuda else self._on_cpu
        reference, own = partial(super().__call__, spec), partial(by_rows, spec)
        return with_gradients_of(reference, own, (q_TNH, k_TKH, v_TKH))

    def _on_cpu(
        self, spec: AttentionSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> torch.Tensor:
        if self._by_pages is None:
            from areal.engine.native.torch_runner import KVCache, PagedAttention

            # The pages of one layer serve all, one after the other.
            shape = (1, self._num_pages, _PAGE, *k_TKH.shape[1:])
            cache = KVCache(k_TKH.new_zeros(shape), v_TKH.new_zeros(shape), {_ANY: 0})
            pages_TP = self._pages_CP[self._chunk_T].long().numpy()
            self._by_pages = PagedAttention(cache, self.positions_T.numpy(), pages_TP)
        return self._by_pages(replace(spec, layer=_ANY), q_TNH, k_TKH, v_TKH)

    def _by_rows(
        self, spec: AttentionSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> torch.Tensor:
        from areal.engine.native.cuda.decode_attention import rows_attention  # needs Triton

        shape = (self._num_pages, k_TKH.shape[1], _PAGE, k_TKH.shape[2])
        keys, values = k_TKH.new_zeros(shape), v_TKH.new_zeros(shape)
        offset_T = self.positions_T % _PAGE
        keys[self._page_T, :, offset_T] = k_TKH
        values[self._page_T, :, offset_T] = v_TKH
        out_TNH = torch.empty_like(q_TNH)
        rows_attention(
            q_TNH.contiguous(), keys, values, self._pages_CP, self._chunk_T.int(),
            self.positions_T.int(), out_TNH, window=spec.window, scale=spec.scale,
        )  # fmt: skip
        return out_TNH
