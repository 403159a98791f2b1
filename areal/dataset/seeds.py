"""Rows that are only a seed, for environments that make their own tasks: {"seed": 7}.

The seeds of the test split begin at 1,000,000,000, so that no run trains on a task it tests with.
"""

from __future__ import annotations

from typing import Any

from areal.dataset.chat_rows import Rows, wants_held_out

FIRST_TEST_SEED = 1_000_000_000


def get_seeds_rl_dataset(
    path: str,
    split: str,
    tokenizer: Any,
    max_length: int | None = None,
    num_rows: int = 4096,
) -> Rows:
    """`num_rows` rows; a seed has no tokens, so `max_length` drops none."""
    if not (isinstance(num_rows, int) and 0 < num_rows <= FIRST_TEST_SEED):
        raise ValueError(f"dataset_kwargs.num_rows must be a whole number above 0, got {num_rows}")
    first = FIRST_TEST_SEED if wants_held_out(split) else 0
    return Rows({"seed": first + number} for number in range(num_rows))
