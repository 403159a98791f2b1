"""The decoder as the trainer runs it, for batch-invariant numerics: the module itself, op by op.

Has the surface of `FusedDecoder`, but no form for few rows. The module's linear layers are
`InvariantLinear`; what it adds is where keys and values go.
"""

from __future__ import annotations

import torch

from areal.engine.native.cuda.cache import PagedCache
from areal.engine.native.cuda.decoder import Attend, Rows
from areal.models.common.decoder import Decoder
from areal.models.common.invariant import invariant_logits, make_invariant


class ModuleDecoder:
    def __init__(self, model: Decoder, cache: PagedCache) -> None:
        make_invariant(model)
        self._model = model
        self._cache = cache

    def forward(self, rows: Rows, attend: Attend) -> torch.Tensor:
        page_T = (rows.write_T // self._cache.page_size).long()
        offset_T = (rows.write_T % self._cache.page_size).long()

        def cache_and_attend(layer, q_TNH, k_TKH, v_TKH, *, window=None, scale=None):
            assert window is None and scale is None, "runners.py keeps such models from here"
            keys, values = self._cache.layer(layer)
            keys[page_T, :, offset_T] = k_TKH
            values[page_T, :, offset_T] = v_TKH
            out_TNH = torch.empty_like(q_TNH)
            attend(layer, q_TNH, out_TNH)
            return out_TNH

        return self._model(rows.tokens_T, rows.positions_T, cache_and_attend)

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return invariant_logits(hidden_TD, self._model.output_weight)
