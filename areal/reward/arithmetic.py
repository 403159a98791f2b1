"""Values of plain-text arithmetic, and when two numbers are the same answer.

`value("3+2") == Fraction(5)`: numbers with + - * / ^ and brackets, in exact fractions. Nothing is
evaluated as code, and the size of every result is bounded, so no text can make it slow. Anything
else (LaTeX, letters, roots) has no value here and is left to math-verify.
"""

from __future__ import annotations

import re
from fractions import Fraction

DIGITS = 6  # of agreement between equal numbers
MAX_CHARACTERS = 1000  # a longer text is not a final answer
MAX_BITS = 50_000  # of numerator and denominator: about 15,000 decimal digits
MAX_NESTING = 50  # of brackets and signs

# 1,234,567.5 or 12 or 0.5 or .5
NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_TOKEN = re.compile(rf"\s*(?:(?P<number>{NUMBER})|(?P<symbol>\*\*|[-+*/^()×÷·]))")
_SYMBOLS = {"**": "^", "×": "*", "·": "*", "÷": "/"}


class TooLargeError(ArithmeticError):
    """A number with more digits than any answer has, such as 9^9^9."""


def same_number(gold: Fraction, given: Fraction) -> bool:
    """Equal when rounded to 6 decimals, or below 0.1 to 6 significant digits.

    So whole numbers must be equal, 0.333333 is 1/3, 0.33333 is not, and 2e-7 is not 1e-7.
    """
    unit = Fraction(1, 10**DIGITS)
    while 0 < abs(gold) < unit * 10 ** (DIGITS - 1):
        unit /= 10
    return abs(gold - given) <= unit / 2


def value(text: str) -> Fraction | None:
    """The value of the text; None if it is not plain arithmetic, or divides by 0.

    TooLargeError if the result or an intermediate number exceeds MAX_BITS.
    """
    tokens = _tokens(text)
    if tokens is None:
        return None
    try:
        found = _sum(tokens, 0)
    except (_NotArithmetic, ZeroDivisionError):
        return None
    return found if not tokens else None


def nesting(text: str) -> int:
    """Maximum depth of open brackets of any kind."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _tokens(text: str) -> list[str | Fraction] | None:
    """In reverse order, so that `pop` returns them in order."""
    if len(text) > MAX_CHARACTERS:
        return None
    text = text.strip()
    tokens: list[str | Fraction] = []
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            return None
        number, symbol = match["number"], match["symbol"]
        tokens.append(Fraction(number.replace(",", "")) if number else _SYMBOLS.get(symbol, symbol))
        place = match.end()
    return tokens[::-1]


class _NotArithmetic(Exception):
    """The tokens do not form an expression."""


def _sum(tokens: list[str | Fraction], depth: int) -> Fraction:
    total = _product(tokens, depth)
    while tokens and tokens[-1] in ("+", "-"):
        sign = tokens.pop()
        term = _product(tokens, depth)
        total = _bounded(total + term if sign == "+" else total - term)
    return total


def _product(tokens: list[str | Fraction], depth: int) -> Fraction:
    total = _signed(tokens, depth)
    while tokens and tokens[-1] in ("*", "/"):
        operator = tokens.pop()
        factor = _signed(tokens, depth)
        total = _bounded(total * factor if operator == "*" else total / factor)
    return total


def _signed(tokens: list[str | Fraction], depth: int) -> Fraction:
    """-2^2 is -(2^2)."""
    if depth > MAX_NESTING:
        raise _NotArithmetic
    if tokens and tokens[-1] in ("+", "-"):
        sign = tokens.pop()
        operand = _signed(tokens, depth + 1)
        return -operand if sign == "-" else operand
    base = _atom(tokens, depth)
    if tokens and tokens[-1] == "^":
        tokens.pop()
        return _power(base, _signed(tokens, depth + 1))
    return base


def _atom(tokens: list[str | Fraction], depth: int) -> Fraction:
    token = tokens.pop() if tokens else None
    if isinstance(token, Fraction):
        return token
    if token != "(":
        raise _NotArithmetic
    inside = _sum(tokens, depth + 1)
    if not tokens or tokens.pop() != ")":
        raise _NotArithmetic
    return inside


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise _NotArithmetic  # a root: possibly irrational
    # Checked before computing; 0, 1 and -1 stay small whatever the exponent.
    if _bits(base) > 1 and _bits(base) * abs(exponent) > MAX_BITS:
        raise TooLargeError("a power of so many digits is no answer")
    return base**exponent.numerator


def _bounded(number: Fraction) -> Fraction:
    if _bits(number) > MAX_BITS:
        raise TooLargeError("a number of so many digits is no answer")
    return number


def _bits(number: Fraction) -> int:
    return max(number.numerator.bit_length(), number.denominator.bit_length())
