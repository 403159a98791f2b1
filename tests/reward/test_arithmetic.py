"""Plain arithmetic as fractions, and when two numbers are one answer."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.reward.arithmetic import TooLargeError, same_number, value


@pytest.mark.parametrize(
    "text, result",
    [
        ("5", "5"),
        ("1,234.50", "1234.5"),
        ("3 + 2", "5"),
        ("7-5-1", "1"),
        ("2*3/4", "3/2"),
        ("2 × 3 ÷ 4", "3/2"),
        ("2^3^2", "512"),
        ("2**-2", "1/4"),
        ("-2^2", "-4"),
        ("(-2)^2", "4"),
        ("-(3+2)*2", "-10"),
        ("0^0", "1"),
        ("1^999999999999", "1"),
        ("1/3", "1/3"),
    ],
)
def test_value(text, result):
    assert value(text) == Fraction(result)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1/0",
        "0^-1",
        "3+",
        "3 4",
        "(3",
        "3)",
        "2^(1/2)",
        "5 apples",
        "1e5",
        "(" * 60 + "1",
        "1" * 1001,
    ],
)
def test_what_is_not_plain_arithmetic_has_no_value(text):
    assert value(text) is None


@pytest.mark.parametrize(
    "text", ["9**9**9", "9^9^9^9", "10^100000", "0.1^100000", "7^20000*7^20000"]
)
def test_a_number_beyond_all_bounds_is_never_computed(text):
    with pytest.raises(TooLargeError):
        value(text)


@st.composite
def sums(draw, depth: int = 3) -> str:
    if depth == 0 or draw(st.booleans()):
        return str(draw(st.integers(0, 99)))
    left, right = draw(sums(depth - 1)), draw(sums(depth - 1))
    return f"({left}{draw(st.sampled_from(['+', '-', '*', '/']))}{right})"


@given(sums())
def test_fractions_are_those_of_python(text: str):
    numbers = re.sub(r"\d+", lambda number: f"Fraction({number.group()})", text)
    try:
        expected = eval(numbers, {"Fraction": Fraction})
    except ZeroDivisionError:
        expected = None
    assert value(text) == expected


@given(st.text(alphabet="0123456789.,+-*/^() ×÷", max_size=40))
def test_no_text_breaks_it(text: str):
    try:
        found = value(text)
    except TooLargeError:
        return
    assert found is None or isinstance(found, Fraction)


@pytest.mark.parametrize(
    "gold, given, same",
    [
        ("0.066666793", "0.0666668", True),
        ("0.066666793", "0.066667", False),  # five digits
        ("1/3", "0.333333", True),
        ("1/3", "0.33333", False),
        ("2/3", "0.666667", True),
        ("12.3456789", "12.345679", True),
        ("12.3456789", "12.34568", False),
        ("1234567", "1234568", False),  # whole numbers must be equal
        ("0.0000001", "0.0000002", False),
        ("0", "0.0000001", True),
        ("0", "0.000001", False),
        ("-0.5", "0.5", False),
    ],
)
def test_six_digits(gold, given, same):
    assert same_number(Fraction(gold), Fraction(given)) is same
