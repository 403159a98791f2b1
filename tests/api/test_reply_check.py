"""What a server may answer: every rule by example, and any list by a slow twin of the check."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.io_struct import (
    MAX_LOGPROB,
    MIN_SAMPLED_LOGPROB,
    check_amount,
    check_lengths,
    check_logprobs,
    check_tokens,
    check_versions,
)

anything = st.one_of(
    st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=2), st.just(10**400)
)


def accepts(check, *args, **options) -> bool:
    try:
        check(*args, **options)
    except ValueError as error:
        assert str(error).startswith("output_")
        return False
    return True


@given(st.lists(anything | st.floats(-2000, 0.002)) | anything)
def test_any_logprobs(values):
    def is_one(value):
        is_number = type(value) in (int, float)
        return is_number and MIN_SAMPLED_LOGPROB <= value <= MAX_LOGPROB

    expected = isinstance(values, list) and all(map(is_one, values))
    assert accepts(check_logprobs, values) == expected


@given(st.lists(st.floats()))
def test_scores_of_given_tokens_may_be_low(values):
    expected = all(math.isfinite(value) and value <= MAX_LOGPROB for value in values)
    assert accepts(check_logprobs, values, low=-math.inf) == expected


@given(st.lists(anything | st.integers(-1, 10)) | anything)
def test_any_tokens(values):
    fits = isinstance(values, list) and all(type(v) is int and 0 <= v < 10 for v in values)
    assert accepts(check_tokens, values, vocab_size=10) == fits


@given(st.lists(st.integers(-1, 4)), st.integers(0, 4), st.integers(0, 3))
def test_any_versions(versions, newest, first):
    expected = all(0 <= v <= newest for v in versions) and sorted(versions) == versions
    expected = expected and (not versions or versions[0] >= first)
    assert accepts(check_versions, versions, newest=newest, first=first) == expected


def test_versions_are_integers():
    for versions in ([True], [1.0], [None], None, "1", [1 << 31], [10**400]):
        assert not accepts(check_versions, versions)


@pytest.mark.parametrize(
    ("num_tokens", "reason", "expected"),
    [(4, "length", True), (5, "length", False), (0, "abort", True), (0, None, True)]
    + [(0, "stop", False), (0, "length", False), (1, "stop", True), (5, None, False)],
)
def test_amounts(num_tokens, reason, expected):
    assert accepts(check_amount, num_tokens, reason, max_tokens=4) == expected
    assert not accepts(check_lengths, [1, 2], [-1.0])
