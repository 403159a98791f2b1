"""Rewards of countdown, CLEVR count and Geometry3K: what counts as a right answer."""

from __future__ import annotations

import pytest

from areal.reward import REWARD_FNS, get_reward_fn
from areal.reward.answer_text import last_bracketed
from areal.reward.clevr_count_70k import clevr_count_70k_reward_fn
from areal.reward.countdown import LEGAL_BUT_WRONG, countdown_reward_fn
from areal.reward.geometry3k import geometry3k_reward_fn
from areal.sandbox.pool import AsyncRewardWrapper


@pytest.mark.parametrize(
    "text, reward",
    [
        ("(3+5)*9", 1.0),
        ("<answer>9*(5+3)</answer>", 1.0),
        ("<answer>1</answer> no: <answer> (5+3)*9 = 72 </answer>. Done", 1.0),
        ("first 5*9\n(3+5)*9=72", 1.0),
        ("9*3+5*9", 0.0),  # 9 twice
        ("8*9", 0.0),  # other numbers
        ("3+5+9", LEGAL_BUT_WRONG),
        ("9/(5-3)", LEGAL_BUT_WRONG),
        ("9/(5-5)", 0.0),
        ("3+5*", 0.0),
        ("", 0.0),
        ("72", 0.0),
        ("__import__('os').getpid()", 0.0),
        ("3**5*9", 0.0),
        ("3.0+5+9", 0.0),
        ("-3+5+9", 0.0),
        ("True+5+9", 0.0),
        ("(" * 20_000 + "3", 0.0),
        ("the answer is unknown", 0.0),
    ],
)
def test_countdown(text, reward):
    assert countdown_reward_fn("", text, [], [], answer="72", nums=[9, 5, 3]) == reward


def test_countdown_computes_in_fractions():
    row = {"answer": "24", "nums": [8, 8, 3, 3]}
    assert countdown_reward_fn("", "8/(3-8/3)", [], [], **row) == 1.0


@pytest.mark.parametrize(
    "text, reward",
    [
        ("[5]", 1.0),
        ("I count [4], no: [ 5 ]", 1.0),
        ("[5.0]", 1.0),
        ("5", 0.0),
        ("[five]", 0.0),
        ("[5 items]", 0.0),
        ("[5] or [6]", 0.0),
        ("[]", 0.0),
        ("", 0.0),
    ],
)
def test_clevr_count(text, reward):
    assert clevr_count_70k_reward_fn("", text, [], [], answer="5") == reward


def test_clevr_count_reads_the_number_of_a_wordy_answer_and_refuses_none():
    assert clevr_count_70k_reward_fn("", "[5]", [], [], answer="There are 5 items") == 1.0
    with pytest.raises(ValueError, match="no number in the answer 'some'"):
        clevr_count_70k_reward_fn("", "[5]", [], [], answer="some")


@pytest.mark.parametrize(
    "text, answer, reward",
    [
        ("so [105]", "105", 1.0),
        (r"so \boxed{105}, or [3]", "105", 1.0),
        (r"[2\sqrt{221}]", r"2 \sqrt { 221 }", 1.0),
        ("[2.5]", r"\frac { 5 } { 2 }", 1.0),
        ("[9]", r"9 \pi", 0.0),
        ("105", "105", 0.0),
        ("[]", "105", 0.0),
    ],
)
def test_geometry3k(text, answer, reward):
    assert geometry3k_reward_fn("", text, [], [], answer=answer) == reward


def test_last_bracketed():
    assert last_bracketed("a [b] [[c] d]") == "c"
    assert last_bracketed("a [b") is None


@pytest.mark.parametrize(
    "name, right, wrong",
    [("clevr_count_70k", "[8]", "[9]"), ("countdown", "3+5", "3*3"), ("geometry3k", "[8]", "[9]")],
)
async def test_by_name_and_in_a_worker(name, right, wrong):
    reward = AsyncRewardWrapper(get_reward_fn(name), max_workers=1)
    try:
        for text, expected in ((right, 1.0), (wrong, 0.0)):
            assert await reward("p", text, [1], [2], answer="8", nums=[3, 5]) == expected
    finally:
        reward.close()


@pytest.mark.parametrize(
    "path, says",
    [
        ("sample_rewards.of_lists", "it takes 2 arguments by position, not 4; a reward gets one"),
        ("sample_rewards.without_data", "it takes no keywords"),
        ("sample_rewards.add", "it takes 2 arguments by position, not 4"),
    ],
)
def test_a_function_of_another_signature_is_told_what_is_expected(path, says):
    expected = "cannot be called as fn(prompt, completions, prompt_ids, completion_ids, **data)"
    with pytest.raises(ValueError) as caught:
        get_reward_fn(path)
    message = str(caught.value)
    assert message.startswith(f"reward_fn: {path}(") and expected in message and says in message


def test_every_row_of_the_table_imports():
    assert all(callable(get_reward_fn(name)) for name in REWARD_FNS)
