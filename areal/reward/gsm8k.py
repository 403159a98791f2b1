r"""Reward for grade-school problems: 1 when the final answer is right, else 0.

A row of GSM8K has the worked solution as its `answer`, which ends with `#### N`: the final number
of the completion must be N, with or without thousands separators, `$`, `%`, units or a full stop.
Any other `answer` is compared mathematically: 0.5, 1/2, 2/4 and `$\frac{1}{2}$` are equal.

The final answer of a completion is the last `\boxed{...}`, the text after `####`, or the last
number (GSM8K) or expression (any other row). Numbers are equal if they agree to 6 decimals, or
below 0.1 to 6 significant digits.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from areal.reward.answer_text import (
    after_hashes,
    final_answer,
    last_boxed,
    last_expression,
    marked_answer,
)
from areal.reward.math_verify import same_answer

# Letters outside LaTeX commands: of a unit, and of a word.
_UNIT = re.compile(r"[\s{][^\W\d_]{2,}")
_WORD = re.compile(r"(?<![\\a-zA-Z])[^\W\d_]{3,}")


def gsm8k_reward_fn(
    prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **data: Any
) -> float:
    gold = after_hashes(str(answer))
    if gold is not None:
        given = final_answer(completions)
        return float(given is not None and same_answer(_without_unit(gold), _without_unit(given)))
    (gold, is_number), marked = _expected(str(answer)), marked_answer(completions)
    if is_number:
        given = last_expression(completions) if marked is None else _without_unit(marked)
        return float(given is not None and same_answer(gold, given))
    if marked is not None:
        return float(same_answer(gold, marked))
    return float(same_answer(gold, completions.strip(), in_prose=_is_sentence(completions)))


@lru_cache(maxsize=1024)  # the samples of a prompt are judged one after another
def _expected(answer: str) -> tuple[str, bool]:
    """The answer of a row not from GSM8K: all of it, unless it is a sentence; and whether it is one
    expression with a value: not x + 1, (1, 2) or 3:2."""
    gold = last_boxed(answer)
    if gold is not None:
        gold = _without_unit(gold)
    elif _is_sentence(answer):
        gold = last_expression(answer)
    else:
        gold = _without_unit(answer.strip())
    if not gold:
        raise ValueError(f"no number in the answer {answer!r:.200} of the data row")
    bare = re.sub(r"\s|\\?\$", "", gold.replace("{,}", ","))
    return gold, last_expression(gold) == bare.lstrip("+").rstrip(".")


def _without_unit(marked: str) -> str:
    """`72` of `72 dollars` or `72\\text{ cm}^2`."""
    return (_UNIT.search(marked) and last_expression(marked)) or marked


def _is_sentence(text: str) -> bool:
    return _WORD.search(text) is not None
