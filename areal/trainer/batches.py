"""Rows of a data set as padded batches `[B, S]`.

Text rows have `input_ids` and `loss_mask`. Preference rows have `chosen_ids` and `rejected_ids`,
which both begin with the same `prompt_len` tokens; they become two neighbouring rows, 2i chosen
and 2i + 1 rejected, and `PAIR` keeps them neighbours in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

PAIR = 2  # rows_per_unit of a preference batch

Rows = Sequence[dict[str, Any]]


def text_batch(rows: Rows) -> dict[str, torch.Tensor]:
    return _padded([row["input_ids"] for row in rows], [row["loss_mask"] for row in rows])


def pair_batch(rows: Rows) -> dict[str, torch.Tensor]:
    """The loss mask is 1 on the answers: on everything after the prompt."""
    ids = [answer for row in rows for answer in (row["chosen_ids"], row["rejected_ids"])]
    prompt_lens = [row["prompt_len"] for row in rows for _ in range(PAIR)]
    masks = [
        [0] * prompt_len + [1] * (len(answer) - prompt_len)
        for answer, prompt_len in zip(ids, prompt_lens, strict=True)
    ]
    return _padded(ids, masks)


def _padded(ids: list[list[int]], masks: list[list[int]]) -> dict[str, torch.Tensor]:
    def pad(rows: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
        return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)

    return {
        "input_ids": pad(ids, torch.int32),
        "loss_mask": pad(masks, torch.int32),
        "attention_mask": pad([[True] * len(row) for row in ids], torch.bool),
    }


class EvalLoss(NamedTuple):
    """The loss of a batch, and how much it counts beside that of other batches."""

    mean: float
    weight: float  # tokens or pairs
