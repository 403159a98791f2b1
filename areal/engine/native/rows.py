"""The rows of one forward: token, position and page table of each, gathered on the host.

Chunks of rows (all decoding sequences; a piece of one prompt) are added one by one; `build` lays
them out as arrays, padded to a multiple of `ROW_MULTIPLE` with rows that write to the scratch page.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from areal.engine.native.kv_cache import SCRATCH_PAGE

# BLAS kernels treat a few leftover rows differently (one row is a matrix-vector product). With
# whole tiles of 16 a row's bits do not depend on how many rows there are.
ROW_MULTIPLE = 16


def padded(num_rows: int) -> int:
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE


@dataclass(slots=True)
class Rows:
    count: int = 0
    _chunks: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)

    def add(self, tokens: np.ndarray, positions: np.ndarray, pages: np.ndarray) -> None:
        """n rows: tokens [n], positions [n], and page tables [n, P], or [P] when they share one."""
        self._chunks.append((tokens, positions, pages))
        self.count += len(tokens)

    def build(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """tokens [T], positions [T], pages [T, P], all int64."""
        num_rows = padded(self.count)
        width = max(pages.shape[-1] for _, _, pages in self._chunks)
        tokens_T = np.zeros(num_rows, np.int64)
        positions_T = np.zeros(num_rows, np.int64)
        pages_TP = np.full((num_rows, width), SCRATCH_PAGE, np.int64)
        start = 0
        for tokens, positions, pages in self._chunks:
            end = start + len(tokens)
            tokens_T[start:end] = tokens
            positions_T[start:end] = positions
            pages_TP[start:end, : pages.shape[-1]] = pages
            start = end
        return tokens_T, positions_T, pages_TP
