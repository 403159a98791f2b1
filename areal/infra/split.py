"""A batch over data-parallel places, and what they answer back in its order.

rows = divide_rows(data, num_places=2, rows_per_unit=1)       # [[0, 2], [1]]
parts = [select_rows(data, own) for own in rows]
merge_rows([outputs of each place], rows)                      # rows as in `data`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from areal.utils.seqpack import pack_sequences
from areal.utils.tree_packing import pack_trees

Rows = list[int]


def divide_rows(
    batch: Mapping[str, Any],
    *,
    num_places: int,
    rows_per_unit: int = 1,
    shares_prefixes: bool = False,
) -> list[Rows]:
    """The rows of each place, ascending, nearly equal in tokens; some have none when there are
    fewer units of `rows_per_unit` neighbours than places.

    With `shares_prefixes` the engines compute once what rows begin with alike: such rows stay
    together, unless there are fewer groups of them than places, and count as their tree does.
    """
    lengths = batch["attention_mask"].sum(dim=1)
    if len(lengths) % rows_per_unit:
        raise ValueError(
            f"the batch has {len(lengths)} rows, which do not make units of {rows_per_unit} rows"
        )
    limits = {"min_bins": num_places, "algorithm": "kk"}
    if not len(lengths):
        parts = []
    elif shares_prefixes:
        ids = batch["input_ids"].numpy(force=True)
        sequences = [row[:length] for row, length in zip(ids, lengths.tolist(), strict=True)]
        parts = pack_trees(sequences, rows_per_unit=rows_per_unit, **limits)
    else:
        units = lengths.view(-1, rows_per_unit).sum(dim=1).tolist()
        parts = pack_sequences(units, **limits)
    rows = [
        [unit * rows_per_unit + row for unit in part for row in range(rows_per_unit)]
        for part in parts
    ]
    return rows + [[]] * (num_places - len(rows))


def merge_rows(parts: Sequence[torch.Tensor], rows: Sequence[Rows]) -> torch.Tensor:
    """Row `rows[i][j]` of the result is row j of `parts[i]`."""
    order = torch.tensor([row for own in rows for row in own])
    joined = torch.cat(list(parts))
    merged = torch.empty_like(joined)
    merged[order] = joined
    return merged
