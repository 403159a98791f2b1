r"""Reward for geometry problems: 1 when the bracketed answer equals the row's `answer`, else 0.

The completion's answer is the last `\boxed{...}`, else the last `[...]`; without either the reward
is 0: an unmarked answer does not count.
"""

from __future__ import annotations

from typing import Any

from areal.reward.answer_text import last_boxed, last_bracketed
from areal.reward.math_verify import same_answer


def geometry3k_reward_fn(
    prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **data: Any
) -> float:
    given = last_boxed(completions)
    if given is None:
        given = last_bracketed(completions)
    return float(given is not None and same_answer(str(answer).strip(), given))
