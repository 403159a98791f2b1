"""Rows over data-parallel places: each once, units whole, tokens balanced, order restored."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal.infra.split import divide_rows, merge_rows


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
