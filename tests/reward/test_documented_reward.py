"""A reward as AReaL's guide writes it: called directly, wrapped, and named in a config."""

from __future__ import annotations

import asyncio

import pytest
from documented import mine_reward_fn

from areal.reward import AsyncRewardWrapper, get_math_verify_worker, get_reward_fn


@pytest.mark.parametrize(("completion", "reward"), [("\\boxed{4}", 1.0), ("\\boxed{5}", 0.0)])
def test_a_reward_of_the_guide(completion, reward):
    arguments = {"prompt": "What is 2+2?", "completions": f"The answer is {completion}"}
    ids = {"prompt_ids": None, "completion_ids": None}
    assert mine_reward_fn(**arguments, **ids, answer="4") == reward
    assert get_reward_fn("documented.mine_reward_fn")(**arguments, **ids, answer="4") == reward


def test_it_is_awaited_in_a_workflow():
    reward_fn = AsyncRewardWrapper(mine_reward_fn)
    data = {"prompt_ids": [1], "completion_ids": [2], "answer": "4", "row": 3}
    try:
        assert asyncio.run(reward_fn("What is 2+2?", "\\boxed{4}", **data)) == 1.0
    finally:
        reward_fn.close()


def test_answers_are_compared_in_a_reward_of_ones_own():
    worker = get_math_verify_worker()
    assert worker.verify("so \\boxed{\\frac{1}{2}}", "0.5") == 1.0
    assert worker.verify("so \\boxed{2}", "0.5") == 0.0
