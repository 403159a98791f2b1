"""Values per token that a loss sees in passing, of a few rows, on their way to whoever shows them.

    batch = row_values.numbered(batch, wanted_B)         # rows that are asked for
    row_values.keep(mb, entropy=entropy_T, ...)          # in the loss, of a packed micro-batch
    found = row_values.take()                            # {row of the batch: {name: its values}}

They cost no pass of their own, and nothing waits for a device before `take`. A rank in another
process takes its own after each call, and the controller adds them here
(infra/train_controller.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

ROW_KEY = "row_ids"
RowValues = dict[int, dict[str, torch.Tensor]]  # row of the batch -> name -> values of its tokens

_kept: list[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]] = []  # rows, cu_seqlens
_found: RowValues = {}  # of other processes


def numbered(batch: Mapping[str, Any], wanted_B: torch.Tensor) -> dict[str, Any]:
    """The batch with a number for each row, by which `keep` knows it: -1 if it is not wanted."""
    rows = torch.arange(len(wanted_B), device=wanted_B.device)
    return {**batch, ROW_KEY: rows.masked_fill(~wanted_B, -1)}


def keep(mb: Mapping[str, Any], **values_T: torch.Tensor) -> None:
    """No-op for rows without a number."""
    if ROW_KEY in mb:
        detached = {name: value_T.detach() for name, value_T in values_T.items()}
        _kept.append((mb[ROW_KEY], mb["cu_seqlens"], detached))


def take() -> RowValues:
    """What was kept or added since the last call, on the CPU."""
    taken = dict(_found)
    for rows, cu_seqlens, values in _kept:
        bounds = cu_seqlens.tolist()
        for row, start, end in zip(rows.tolist(), bounds[:-1], bounds[1:], strict=True):
            if row >= 0:
                taken[row] = {name: value_T[start:end].cpu() for name, value_T in values.items()}
    _kept.clear()
    _found.clear()
    return taken


def add(taken: RowValues) -> None:
    """What `take` has returned in another process."""
    _found.update(taken)
