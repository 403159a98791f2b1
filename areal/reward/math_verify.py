"""Reward for mathematical answers: 1 when the final answer equals the row's `answer`, else 0.

Equal texts and plain arithmetic are decided here; only the rest goes to math-verify, which parses
LaTeX and compares with sympy. Its timeout uses a signal, so it must be called from a main thread,
as in a sandbox worker.

Numbers are equal if they agree to 6 digits (`arithmetic.same_number`), in any notation: 0.5, 1/2,
50% and `\\frac{1}{2}` are one answer. An answer of more than 1,000 characters, more than 50 nested
brackets or more than 15,000 digits is wrong without being computed. A comparison that fails or
times out raises: it says nothing about the answer.
"""

from __future__ import annotations

import threading
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from areal.reward.answer_text import bare_text, marked_answer
from areal.reward.arithmetic import (
    DIGITS,
    MAX_BITS,
    MAX_CHARACTERS,
    MAX_NESTING,
    TooLargeError,
    nesting,
    same_number,
    value,
)

if TYPE_CHECKING:
    from sympy import Basic, Rational

PARSE_TIMEOUT_S = 5
COMPARE_TIMEOUT_S = 5
MAX_PROSE_CHARACTERS = 10_000  # at the end of a text, searched for an answer
_NUMERIC_DIGITS = 30  # of a number without a finite form, such as pi


def math_verify_reward_fn(
    prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **data: Any
) -> float:
    gold = marked_answer(str(answer)) or str(answer).strip()
    given = marked_answer(completions)
    if given is not None:
        return float(same_answer(gold, given))
    return float(same_answer(gold, completions.strip(), in_prose=True))


class MathVerifyWorker:
    """The comparison of `math_verify_reward_fn`, for a reward function of one's own."""

    def verify(self, response: str, ground_truth: str) -> float:
        """1.0 when the final answer in `response` equals that in `ground_truth`, else 0.0."""
        return math_verify_reward_fn("", response, [], [], answer=ground_truth)


@cache
def get_math_verify_worker() -> MathVerifyWorker:
    """The one of this process."""
    return MathVerifyWorker()


def same_answer(gold: str, given: str, *, in_prose: bool = False) -> bool:
    """Whether two answers are equal: as text, as numbers, and last as mathematics.

    `in_prose`: `given` is a whole text in which math-verify has to find the answer. ValueError if
    `gold` is not an answer that can be compared.
    """
    if gold == given:
        return True
    if gold.isdecimal() and given.isdecimal() and max(len(gold), len(given)) <= MAX_CHARACTERS:
        return int(gold) == int(given)  # the common case, at a hundredth of the cost
    if in_prose:
        given = given[-MAX_PROSE_CHARACTERS:]
    elif len(given) > MAX_CHARACTERS or nesting(given) > MAX_NESTING:
        return False
    try:
        gold_numbers = _numbers(gold)
    except TooLargeError as error:
        raise ValueError(
            f"the answer {gold!r:.200} of the data row is too large: {error}"
        ) from None
    try:
        given_numbers = _numbers(given)
        if gold_numbers and given_numbers:
            return any(same_number(g, n) for g in gold_numbers for n in given_numbers)
        return _same_mathematics(gold, given, in_prose)
    except TooLargeError:  # the gold answer is not, so they differ
        return False


def _numbers(text: str) -> list[Fraction]:
    """Values as plain arithmetic. `50%` may mean 50 or 1/2."""
    bare = bare_text(text)
    found = value(bare.rstrip("%"))
    if found is None:
        return []
    return [found, found / 100] if bare.endswith("%") else [found]


def _same_mathematics(gold: str, given: str, in_prose: bool) -> bool:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "math-verify needs a main thread for its time limit; call this reward through "
            "AsyncRewardWrapper"
        )
    from math_verify.errors import TimeoutException
    from math_verify.utils import timeout

    try:
        gold_parsed = _parse(f"${gold}$") or _parse(gold)
        if not gold_parsed:
            raise ValueError(f"the answer {gold!r:.200} of the data row is not mathematics")
        given_parsed = (not in_prose and _parse(f"${given}$")) or _parse(given)
        if not given_parsed:
            return False
        compare = timeout(timeout_seconds=COMPARE_TIMEOUT_S)(_equal)
        return compare(gold_parsed, given_parsed, has_percent="%" in gold + given)
    except TimeoutException:  # a BaseException, which callers do not expect
        raise TimeoutError(
            f"math-verify took longer than {COMPARE_TIMEOUT_S} s over {given!r:.200}"
        ) from None


def _parse(text: str) -> list[Any]:
    """What math-verify finds in `text`, possibly nothing. Timeouts and MemoryError are raised."""
    from math_verify import parse

    try:
        return parse(text, parsing_timeout=PARSE_TIMEOUT_S, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:  # any parser error: the text is not mathematics
        return []


def _equal(gold: list[Any], given: list[Any], has_percent: bool) -> bool:
    from math_verify import verify

    if _is_too_large(gold[0]):
        raise ValueError(
            f"the answer {str(gold[0])!r:.200} of the data row is too large to compare"
        )
    if _is_too_large(given[0]):
        return False
    gold_number, given_number = _number(gold[0]), _number(given[0])
    if gold_number is not None and given_number is not None:
        same = same_number(gold_number, given_number)
        if same or not has_percent:
            return same
    return verify(
        gold,
        given,
        float_rounding=DIGITS,
        timeout_seconds=COMPARE_TIMEOUT_S,
        raise_on_error=True,
    )


def _number(expression: Basic | str) -> Fraction | None:
    """Its value as a real number."""
    from sympy import Float, N, Rational

    if not getattr(expression, "is_number", False):  # a text, a matrix, an equation
        return None
    found = N(expression, _NUMERIC_DIGITS)
    if not isinstance(found, Float) or not found.is_finite:
        return None
    exact = cast(Rational, Rational(found))
    return Fraction(int(exact.p), int(exact.q))


def _is_too_large(expression: Basic | str) -> bool:
    """Whether sympy would have to expand a number beyond the bound."""
    return not isinstance(expression, str) and _bits(expression) > MAX_BITS


def _bits(expression: Basic) -> float:
    """Upper bound on binary digits before the point; infinite if beyond a float."""
    args = [_bits(arg) for arg in getattr(expression, "args", ()) if hasattr(arg, "args")]
    match type(expression).__name__:
        case "Pow":
            return args[0] * _size(args[1])
        case "exp":
            return 2 * _size(args[0])
        case "factorial" | "gamma":
            return args[0] * _size(args[0])
        case "Mul" | "Add":
            return sum(args)
    if getattr(expression, "is_Rational", False):
        number = cast("Rational", expression)
        return float(max(int(number.p).bit_length(), int(number.q).bit_length()))
    return max(args, default=1.0)


def _size(bits: float) -> float:
    return 2.0**bits if bits < 1000 else float("inf")
