"""The experts of every cached token, for requests that ask which ones computed their tokens.

One row per position of the key/value cache, written by the forward that computes the position's key
and value, shared and copied with its page, and read when a request ends. So prompts found in the
cache have their experts too, and a position that is computed again (a preemption, new weights) has
those of its last computation.

Shapes: T rows of a forward, L layers with experts, K experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np

    from areal.models.common.args import MoEArgs


class ExpertCache:
    def __init__(
        self, moe: MoEArgs, *, num_pages: int, page_size: int, device: torch.device
    ) -> None:
        # The largest value of the dtype is no expert: it stands for a token without a record.
        dtype = torch.uint8 if moe.num_experts <= 255 else torch.int16
        shape = (num_pages, page_size, len(moe.layers), moe.top_k)
        self._routed = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, write_T: torch.Tensor, routed_TLK: torch.Tensor) -> None:
        """`write_T`: flat cache positions, page * page_size + offset."""
        routed = self._routed.flatten(0, 1)
        routed.index_copy_(0, write_T.long(), routed_TLK.to(routed.dtype))

    def copy_pages(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self._routed.index_copy_(0, targets, self._routed.index_select(0, sources))

    def read(self, pages: list[int], num_tokens: int) -> np.ndarray:
        """[num_tokens, L, K] of a sequence with these pages. Waits for the device."""
        index = torch.tensor(pages, device=self._routed.device)
        return self._routed.index_select(0, index).flatten(0, 1)[:num_tokens].cpu().numpy()
