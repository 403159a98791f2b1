"""Between a padded batch [B, S] and the lists of token ids a native engine scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from areal.utils.data import sequence_lengths


def token_lists(data: Mapping[str, Any]) -> list[list[int]]:
    lengths = sequence_lengths(data["attention_mask"])
    rows = zip(data["input_ids"].tolist(), lengths.tolist(), strict=True)
    return [row[:length] for row, length in rows]


def padded_scores(scores: list[list[float]], data: Mapping[str, Any]) -> torch.Tensor:
    out_BS = torch.zeros(data["input_ids"].shape, dtype=torch.float32)
    for row_S, its_scores in zip(out_BS, scores, strict=True):
        row_S[: len(its_scores)] = torch.tensor(its_scores)
    return out_BS
