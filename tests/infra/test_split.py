"""Rows over data-parallel places: each once, units whole, tokens balanced, order restored."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal.infra.train_controller import divide_rows, merge_rows


def batch_of(lengths: list[int]) -> dict[str, torch.Tensor]:
    width = max(lengths, default=1)
    return {"attention_mask": torch.arange(width) < torch.tensor(lengths)[:, None]}


def test_long_rows_are_spread_and_short_ones_fill_up():
    assert divide_rows(batch_of([8, 1, 8, 1, 2]), num_places=2) in (
        [[0, 1, 3], [2, 4]],
        [[0, 4], [1, 2, 3]],
    )


def test_pairs_stay_together():
    rows = divide_rows(batch_of([5, 1, 1, 1, 2, 2]), num_places=2, rows_per_unit=2)
    assert sorted(rows) == [[0, 1], [2, 3, 4, 5]]
    with pytest.raises(ValueError, match="3 rows, which do not make units of 2"):
        divide_rows(batch_of([1, 1, 1]), num_places=2, rows_per_unit=2)


def test_more_places_than_rows_leaves_some_without():
    assert divide_rows(batch_of([3]), num_places=3) == [[0], [], []]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    num_places=st.integers(1, 5),
    rows_per_unit=st.integers(1, 3),
)
def test_what_was_divided_comes_back_in_order(lengths, num_places, rows_per_unit):
    lengths = lengths * rows_per_unit
    rows = divide_rows(batch_of(lengths), num_places=num_places, rows_per_unit=rows_per_unit)
    assert len(rows) == num_places and sorted(sum(rows, [])) == list(range(len(lengths)))
    for own in rows:
        units = [own[i : i + rows_per_unit] for i in range(0, len(own), rows_per_unit)]
        assert all(unit[0] % rows_per_unit == 0 for unit in units)
        assert all(unit == list(range(unit[0], unit[0] + rows_per_unit)) for unit in units)
    loads = [sum(lengths[row] for row in own) for own in rows]
    largest_unit = max(
        sum(lengths[i : i + rows_per_unit]) for i in range(0, len(lengths), rows_per_unit)
    )
    assert max(loads) - min(loads) <= largest_unit
    values = torch.arange(len(lengths) * 2).view(-1, 2)
    assert torch.equal(merge_rows([values[own] for own in rows], rows), values)


def test_rows_that_begin_alike_stay_on_one_place():
    prompts = [[1] * 8, [2] * 8]
    ids = torch.tensor([[*prompts[row % 2], row, row] for row in range(6)])
    batch = {"input_ids": ids, "attention_mask": torch.ones(6, 10, dtype=torch.bool)}
    rows = divide_rows(batch, num_places=2, shares_prefixes=True)
    assert sorted(rows) == [[0, 2, 4], [1, 3, 5]]
    # One group alone is parted: a place without rows would only wait.
    alone = {key: value[::2] for key, value in batch.items()}
    rows = divide_rows(alone, num_places=2, shares_prefixes=True)
    assert sorted(sum(rows, [])) == [0, 1, 2] and all(rows)
    # Padding is no common beginning.
    short = {**batch, "attention_mask": torch.arange(10) < torch.tensor([[1]] * 6)}
    assert sorted(sum(divide_rows(short, num_places=2, shares_prefixes=True), [])) == list(range(6))
    none = {key: value[:0] for key, value in batch.items()}
    assert divide_rows(none, num_places=2, shares_prefixes=True) == [[], []]
