"""A reward is told from one that teaches nothing by the row's own answer and by nonsense."""

from __future__ import annotations

import functools

import pytest
import sample_rewards
import torch
from doctor.test_faults import SMALL
from tiny_run import grpo_config

from areal.dataset.arithmetic import build_char_tokenizer
from areal.doctor.reference import reads_reply
from areal.doctor.report import Chart
from areal.doctor.rewards import check_rewards
from areal.reward import REWARD_FNS, get_reward_fn
from areal.rollout.event_loop import TaskRunner
from areal.rollout.source import Prompt

ROWS = [
    {"messages": [{"role": "user", "content": f"{i}+{i}="}], "answer": str(2 * i)} for i in (1, 2)
]


@pytest.fixture(scope="module")
def runner():
    runner = TaskRunner("test")
    runner.start()
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def look(tmp_path_factory, runner):
    """The finding of the stage, for two samples of each row that say the same wrong thing."""
    tmp_path = tmp_path_factory.mktemp("reference")
    tokenizer = build_char_tokenizer(tmp_path / "tokenizer")

    def look(reward_fn: str, rows=ROWS, replies=("=", "="), rewards=(0.0, 0.0)):
        chart = Chart()
        config = grpo_config(tmp_path, *SMALL, f"reward_fn={reward_fn}")
        prompts = [Prompt(n, 0, n, row) for n, row in enumerate(rows)]
        trajectories = [trajectory(tokenizer, row, replies, rewards) for row in rows]
        check_rewards(chart, config, runner, tokenizer, prompts, trajectories)
        return next(one for one in chart.findings if one.stage == "reward"), chart

    return look


def trajectory(tokenizer, row, replies, rewards):
    prompt = tokenizer(row["messages"][0]["content"])["input_ids"]
    rows = [prompt + tokenizer(reply)["input_ids"] for reply in replies]
    mask = [[0] * len(prompt) + [1] * (len(ids) - len(prompt)) for ids in rows]
    return {
        "input_ids": torch.tensor(rows),
        "loss_mask": torch.tensor(mask),
        "rewards": torch.tensor(rewards),
    }


BY_ANSWER = ("clevr_count_70k", "geometry3k", "gsm8k", "math_verify", "sample_rewards.exact_match")


@pytest.mark.parametrize("reward_fn", BY_ANSWER)
def test_a_hard_task_is_no_fault(look, reward_fn):
    finding, _ = look(reward_fn)
    assert (finding.state, "other texts earn 0 to 1" in finding.found) == ("ok", True), finding


def test_a_number_within_the_answer_is_tried_alone(look):
    rows = [{**row, "answer": f"{row['answer']} boxes"} for row in ROWS]
    finding, _ = look("clevr_count_70k", rows)
    assert (finding.state, "other texts earn 0 to 1" in finding.found) == ("ok", True), finding


def test_a_form_that_nobody_knows_is_a_doubt(look):
    finding, chart = look("sample_rewards.strict_form")
    assert finding.state == "doubt" and "the row's own answer, such as '2'" in finding.found
    assert chart.exit_code == 0
    assert chart.verdict().startswith("healthy") and "look at reward" in chart.verdict()


def test_what_has_no_known_answer_is_not_compared(look):
    rows = [{**row, "nums": [1, 1]} for row in ROWS]
    finding, _ = look("countdown", rows)
    assert finding.state == "ok" and "countdown has no reply that is known" in finding.found
    rows = [{"messages": row["messages"]} for row in ROWS]
    finding, _ = look("sample_rewards.digit_share_reward_fn", rows)
    assert finding.state == "ok" and "rows have no column 'answer'" in finding.found


def test_samples_that_differ_need_no_other_texts(look):
    finding, _ = look("sample_rewards.exact_match", ROWS[:1], ("2", "="), (1.0, 0.0))
    assert (finding.state, finding.found) == ("ok", "2 rewards, computed again, are equal")


def by_alias(prompt, completions, prompt_ids, completion_ids, **data):
    return by_inner(lambda: completions)


def by_inner(read):
    return float(len(read()))


def by_frame(prompt, completions, prompt_ids, completion_ids, **data):
    return float(len(locals()["completions"]))


def test_only_code_that_never_reads_the_reply_is_accused():
    assert not reads_reply(sample_rewards.always_one)
    assert not reads_reply(sample_rewards.without_data)
    for fair in (by_alias, by_frame, sample_rewards.exact_match, functools.partial(by_alias)):
        assert reads_reply(fair)
    assert all(reads_reply(get_reward_fn(name)) for name in REWARD_FNS)
