"""Reward for mathematical answers: 1 when the final answer equals the row's `answer`, else 0.

Equal texts and plain numbers are settled here; only what is left goes to math-verify, which parses
LaTeX and compares by sympy. Its clock runs on a signal, so it must be called from a main thread,
as a reward worker does.
"""

from __future__ import annotations

import threading
from typing import Any

from areal.reward.answer_text import marked_answer, plain_number

PARSE_TIMEOUT_S = 5
COMPARE_TIMEOUT_S = 5
FLOAT_ROUNDING = 6  # decimal places in which two floats must agree


def math_verify_reward_fn(
    prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **data: Any
) -> float:
    gold = marked_answer(str(answer)) or str(answer).strip()
    given = marked_answer(completions)
    if given is not None:
        return float(same_answer(gold, given))
    return float(same_answer(gold, completions.strip(), in_prose=True))


def same_answer(gold: str, given: str, *, in_prose: bool = False) -> bool:
    """Whether two answers are equal: as text, as numbers, and last as mathematics.

    `in_prose` says that `given` is a whole text in which math-verify has to find the answer.
    """
    if gold == given:
        return True
    gold_number, given_number = plain_number(gold), plain_number(given)
    if gold_number is not None and given_number is not None:
        return gold_number == given_number
    return _same_mathematics(gold, given, in_prose)


def _same_mathematics(gold: str, given: str, in_prose: bool) -> bool:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "math-verify needs a main thread for its time limit; call this reward through "
            "AsyncRewardWrapper"
        )
    from math_verify import verify

    gold_parsed = _parse(f"${gold}$") or _parse(gold)
    if not gold_parsed:
        raise ValueError(f"the answer {gold!r:.200} of the data row is not mathematics")
    given_parsed = (not in_prose and _parse(f"${given}$")) or _parse(given)
    if not given_parsed:
        return False
    try:
        return verify(
            gold_parsed,
            given_parsed,
            float_rounding=FLOAT_ROUNDING,
            timeout_seconds=COMPARE_TIMEOUT_S,
            raise_on_error=True,
        )
    except Exception:  # two things sympy cannot compare are not equal; its timeout flies on
        return False


def _parse(text: str) -> list[Any]:
    """What math-verify reads in `text`, [] when nothing. Running out of time is raised."""
    from math_verify import parse

    try:
        return parse(text, parsing_timeout=PARSE_TIMEOUT_S, raise_on_error=True)
    except Exception:  # text the parser breaks on holds no answer
        return []
