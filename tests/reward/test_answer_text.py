"""Finding the final answer in a text."""

from __future__ import annotations

from decimal import Decimal

import pytest
from growth import assert_linear

from areal.reward.answer_text import (
    final_answer,
    last_boxed,
    last_expression,
    last_number,
    plain_number,
)


@pytest.mark.parametrize(
    "text, number",
    [
        ("83", "83"),
        ("38>83", "83"),
        ("53->-35", "-35"),
        ("7-5", "5"),  # a subtraction, not minus five
        ("x = -5.", "-5"),
        ("it costs $1,234.50 today", "1,234.50"),
        ("12, 34", "34"),
        ("about .5", ".5"),
        ("none here", None),
        ("", None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    "text, content",
    [
        (r"so \boxed{72}", "72"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{3} and \boxed{4", "3"),  # cut off by the length limit
        ("no box", None),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


def test_a_mark_wins_over_later_numbers():
    assert final_answer("48/2 = 24\n#### 72") == "72"
    assert final_answer("#### 72\nchecked 3 times") == "72"
    assert final_answer(r"\boxed{72}, after 3 steps") == "72"
    assert final_answer("####") is None


@pytest.mark.parametrize(
    "text, value",
    [
        ("72", "72"),
        ("72.0", "72.0"),
        ("-1,234", "-1234"),
        (r"\$18", "18"),
        ("18%", "18"),
        ("18.", "18"),
        ("1/2", None),
        ("12,34", None),
        ("x", None),
        ("1e5", None),
    ],
)
def test_plain_number(text, value):
    assert plain_number(text) == (None if value is None else Decimal(value))


@pytest.mark.parametrize(
    "text, expression",
    [
        ("the answer is 3 + 2.", "3+2"),
        ("x = 1/2", "1/2"),
        ("3/4 = 0.75", "0.75"),
        ("38>83", "83"),
        ("53->-35", "-35"),
        ("7-5", "7-5"),
        ("it is -$1,234.50 today", "-1,234.50"),
        ("**18**", "18"),
        ("- 18", "18"),  # an item of a list
        ("12, 34", "34"),
        ("1) 5", "5"),
        ("(about 5)", "5"),
        ("2(3+4)", "2(3+4)"),
        ("50 %", "50%"),
        (r"so $x = \frac{1}{2}$.", r"\frac{1}{2}"),
        (r"\(2\sqrt{3}\)", r"2\sqrt{3}"),
        (r"2 \cdot 3 apples", r"2\cdot3"),
        (r"5\text{ cm}^2", "5"),
        ("25 m^2", "25"),
        (r"$\pi$", r"\pi"),
        ("none here", None),
    ],
)
def test_last_expression(text, expression):
    assert last_expression(text) == expression


@pytest.mark.parametrize("find", [final_answer, last_boxed, last_expression, last_number])
@pytest.mark.parametrize(
    "unit", ["\\boxed{", "{", "(", "-", "1,", "5 ", "$", "\\frac{", "a", "\ud83d"]
)
def test_time_grows_as_the_text_does(find, unit):
    assert_linear(find, unit, 20_000)
