"""The runner for any device: plain torch, one step per launch, results at once.

Invariant (CPU): tokens and log-probabilities of a request are, bit for bit, a function of weights,
prompt, seed and options. All row functions are independent of the other rows: matrix products
because every forward has whole tiles of rows (rows.py), attention as attention.py tells.

Shapes: T rows, R sampled rows, D model dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from areal.engine.native.attention import KVCache, PagedAttention
from areal.engine.native.rows import Rows, padded
from areal.engine.native.sampler import sample
from areal.utils.cpu_matmul import use_plain_blas

if TYPE_CHECKING:
    from areal.engine.native.runner import Chunk
    from areal.engine.native.scheduler import SlotTable
    from areal.models.common.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Computed:
    """Drawn tokens that are there already."""

    tokens: list[int]
    logprobs: list[float]

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        return [[token] for token in self.tokens], [[logprob] for logprob in self.logprobs]


class TorchRunner:
    steps_per_launch = 1
    launches_ahead = 0

    def __init__(
        self,
        model: Decoder,
        table: SlotTable,
        *,
        num_pages: int,
        page_size: int,
        max_prefill_tokens: int,
    ) -> None:
        args, weight = model.args, model.embedding_weight
        if weight.device.type == "cpu":
            use_plain_blas()
        self.max_prefill_tokens = max_prefill_tokens
        self._model = model
        self._device = weight.device
        self._table = table
        self._cache = KVCache(
            num_layers=args.n_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=args.n_kv_heads,
            head_dim=args.head_dim,
            dtype=weight.dtype,
            device=weight.device,
        )

    def prefill(self, chunks: list[Chunk]) -> torch.Tensor:
        rows = Rows()
        last = []
        for chunk in chunks:
            positions = np.arange(chunk.start, chunk.start + len(chunk.tokens))
            rows.add(np.array(chunk.tokens), positions, np.array(chunk.pages))
            last.append(rows.count - 1)
        return self._forward(rows)[last]

    def decode(self, slots: np.ndarray, num_steps: int) -> Computed:
        assert num_steps == 1, "this runner takes one step at a time"
        table = self._table
        positions = table.num_tokens[slots] - 1
        width = int(positions.max()) // self._cache.page_size + 1
        rows = Rows()
        rows.add(table.last_token[slots], positions, table.pages[slots, :width])
        return self._draw(slots, self._forward(rows)[: len(slots)])

    def draw(self, slots: np.ndarray, hidden: list[torch.Tensor]) -> Computed:
        return self._draw(slots, torch.stack(hidden))

    def _draw(self, slots: np.ndarray, hidden_RD: torch.Tensor) -> Computed:
        num_padding = padded(len(slots)) - len(slots)
        logits_RV = self._model.logits(F.pad(hidden_RD, (0, 0, 0, num_padding)))[: len(slots)]
        tokens, logprobs = sample(logits_RV, self._table.sampling_options(slots))
        self._table.last_token[slots] = tokens
        return Computed(tokens, logprobs)

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        self._cache.copy_pages(sources, targets)

    def load(self, model_weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in model_weights:
            self._model.load_hf_tensor(name, tensor)

    def _forward(self, rows: Rows) -> torch.Tensor:
        """Hidden states [T, D] of all rows; their keys and values are in the cache then."""
        tokens_T, positions_T, pages_TP = rows.build()
        return self._model(
            torch.from_numpy(tokens_T).to(self._device),
            torch.from_numpy(positions_T).to(self._device),
            PagedAttention(self._cache, positions_T, pages_TP),
        )
