"""Bins hold every sequence once, keep to the budget, and are balanced."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.utils.seqpack import ALGORITHMS, pack_sequences


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    max_tokens=st.one_of(st.none(), st.integers(1, 120)),
    min_bins=st.integers(1, 8),
    algorithm=st.sampled_from(sorted(ALGORITHMS)),
)
@settings(max_examples=200)
def test_every_item_once_and_no_bin_over_budget(lengths, max_tokens, min_bins, algorithm):
    bins = pack_sequences(lengths, max_tokens=max_tokens, min_bins=min_bins, algorithm=algorithm)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(b == sorted(b) for b in bins) and bins == sorted(bins)
    assert len(bins) >= min(min_bins, len(lengths))
    for b in bins:
        load = sum(lengths[i] for i in b)
        assert max_tokens is None or len(b) == 1 or load <= max_tokens


def test_ffd_fills_bins_by_hand():
    assert pack_sequences([4, 6, 5, 5], max_tokens=10) == [[0, 1], [2, 3]]


def test_one_long_sequence_gets_its_own_bin():
    assert pack_sequences([3, 99, 3], max_tokens=10) == [[0, 2], [1]]


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_bins_without_budget_are_balanced(algorithm: str):
    lengths = [7, 3, 9, 1, 5, 5, 8, 2, 4, 6, 10, 12]
    bins = pack_sequences(lengths, min_bins=4, algorithm=algorithm)
    loads = [sum(lengths[i] for i in b) for b in bins]
    assert len(bins) == 4 and max(loads) - min(loads) <= 2


def test_karmarkar_karp_beats_greedy_on_its_textbook_case():
    bins = pack_sequences([8, 7, 6, 5, 4], min_bins=2, algorithm="kk")
    loads = sorted(sum([8, 7, 6, 5, 4][i] for i in b) for b in bins)
    assert loads == [14, 16]


def test_more_bins_than_items_gives_one_each():
    assert pack_sequences([5, 5], min_bins=4) == [[0], [1]]


def test_refusals_name_the_fault():
    with pytest.raises(ValueError, match="no sequences"):
        pack_sequences([])
    with pytest.raises(ValueError, match="'ffd', 'kk'"):
        pack_sequences([1], algorithm="best")
