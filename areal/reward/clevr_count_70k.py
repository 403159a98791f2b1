"""Reward for counting: 1 when the last number in square brackets is the row's `answer`, else 0."""

from __future__ import annotations

from typing import Any

from areal.reward.answer_text import last_bracketed, last_number, plain_number


def clevr_count_70k_reward_fn(
    prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **data: Any
) -> float:
    gold = last_number(str(answer))
    if gold is None:
        raise ValueError(f"no number in the answer {answer!r:.200} of the data row")
    given = plain_number(last_bracketed(completions) or "")
    return float(given is not None and given == plain_number(gold))
