r"""Reward for grade-school problems: 1 when the final number is right, else 0.

The final answer is the last `\boxed{...}`, what follows `####`, or the last number of the text, in
the completion as in the row's `answer` (which may be the whole worked solution of GSM8K).
"""

from __future__ import annotations

from typing import Any

from areal.reward.answer_text import final_answer
from areal.reward.math_verify import same_answer


def gsm8k_reward_fn(
    prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **data: Any
) -> float:
    gold = final_answer(str(answer))
    if gold is None:
        raise ValueError(f"no number in the answer {answer!r:.200} of the data row")
    given = final_answer(completions)
    return float(given is not None and same_answer(gold, given))
