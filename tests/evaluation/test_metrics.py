"""Metrics against values computed by hand and against brute force."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.evaluation.metrics import (
    Z95,
    average,
    compare,
    estimate,
    majority_at_k,
    pass_at_k,
    sign_test,
)


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (4, 2, 2, 5 / 6),  # 1 - 1/6
        (4, 3, 2, 1.0),  # no pair of failures is left
        (10, 3, 5, 1 - 21 / 252),
    ],
)
def test_pass_at_k_by_hand(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


@given(passes=st.lists(st.booleans(), min_size=1, max_size=7), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_that_pass(passes, data):
    k = data.draw(st.integers(1, len(passes)))
    subsets = list(itertools.combinations(passes, k))
    share = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(passes), sum(passes), k) == pytest.approx(share)


def test_k_beyond_the_samples_is_refused():
    with pytest.raises(ValueError, match="k must lie between 1 and the number of samples 4, got 5"):
        pass_at_k(4, 2, 5)
    with pytest.raises(ValueError, match="got 0"):
        majority_at_k(["1"], [1.0], 0)


@pytest.mark.parametrize(
    ("answers", "rewards", "k", "expected"),
    [
        (["7", "7", "8"], [1, 1, 0], 3, 1.0),
        (["8", "7", "8"], [0, 1, 0], 3, 0.0),
        (["7", "8"], [1, 0], 2, 0.5),  # a tie shares
        # pairs: (7,7) -> 1, (7,8) -> 1/2 twice
        (["7", "7", "8"], [1, 1, 0], 2, 2 / 3),
        (["7", "7", "8"], [1, 1, 0], 1, 2 / 3),
        ([None, "7", None], [0, 1, 0], 3, 1.0),  # those without an answer do not vote
        ([None, None], [0, 0], 2, 0.0),
        # An answer that was scored both ways counts by its mean.
        (["x", "x", None], [1, 0, 0], 3, 0.5),
    ],
)
def test_majority_by_hand(answers, rewards, k, expected):
    assert majority_at_k(answers, rewards, k) == pytest.approx(expected)


def test_majority_of_many_subsets_is_close_to_that_of_all_and_always_the_same():
    answers = ["7"] * 12 + ["8"] * 8  # C(20, 5) = 15504 subsets
    rewards = [1.0] * 12 + [0.0] * 8
    wins = sum(math.comb(12, i) * math.comb(8, 5 - i) for i in (3, 4, 5)) / math.comb(20, 5)
    found = majority_at_k(answers, rewards, 5)
    assert found == pytest.approx(wins, abs=4 * math.sqrt(wins * (1 - wins) / 1000))
    assert found == majority_at_k(answers, rewards, 5)


def test_wilson_interval_by_hand():
    # Ten problems, all right: n = 10, p = 1. The lower bound is n / (n + z^2).
    all_right = estimate([1.0] * 10)
    assert (all_right.value, all_right.high) == (1.0, 1.0)
    assert all_right.low == pytest.approx(10 / (10 + Z95**2))
    # Eleven problems, 5 right: se^2 = (30/11)/10/11, so p(1-p)/se^2 = 10 trials.
    some = estimate([1.0] * 5 + [0.0] * 6)
    p, n = 5 / 11, 10
    half = Z95 * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n)) / (1 + Z95**2 / n)
    center = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    assert (some.low, some.high) == (pytest.approx(center - half), pytest.approx(center + half))


def test_samples_of_one_problem_are_one_cluster():
    """Eight samples that always agree say no more than one."""
    once = average([[1.0], [0.0], [1.0], [1.0]])
    often = average([[1.0] * 8, [0.0] * 8, [1.0] * 8, [1.0] * 8])
    assert often == once
    spread = average([[1.0, 0.0] * 4] * 4)
    assert spread.value == 0.5


def test_rewards_beyond_one_have_a_normal_interval():
    # mean 2, standard error sqrt(((-2)^2 + 2^2) / 1 / 2) = 2
    found = estimate([0.0, 4.0])
    assert (found.value, found.low) == (2.0, pytest.approx(2 - 2 * Z95))
    assert found.high == pytest.approx(2 + 2 * Z95)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_an_interval_holds_its_value_and_stays_in_bounds(values):
    found = estimate(values)
    assert 0 <= found.low <= found.value + 1e-12
    assert found.value - 1e-12 <= found.high <= 1


def test_paired_comparison_by_hand():
    # differences 1, 1, 0, -1: mean 1/4, variance (9/16 + 9/16 + 1/16 + 25/16) / 3 = 11/12
    found = compare([[0.0], [0.0], [1.0], [1.0]], [[1.0], [1.0], [1.0], [0.0]])
    error = math.sqrt(11 / 12 / 4)
    assert found.difference.value == 0.25
    assert found.difference.low == pytest.approx(0.25 - Z95 * error)
    assert (found.better, found.worse) == (2, 1)
    assert found.p_value == 1.0  # 2 * (1 + 3) / 8


@pytest.mark.parametrize(
    ("better", "worse", "expected"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (8, 1, 2 * 10 / 512), (3, 3, 1.0)],
)
def test_sign_test_by_hand(better, worse, expected):
    assert sign_test(better, worse) == sign_test(worse, better) == pytest.approx(expected)
