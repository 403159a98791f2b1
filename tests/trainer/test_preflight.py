"""`areal check --trial`: one group of episodes against a stub, everything else as in the run."""

from __future__ import annotations

import pytest
from tiny_run import grpo_config, overrides

from areal.cli.demo import recipe_path
from areal.cli.main import main
from areal.trainer.experiment import load_datasets
from areal.trainer.preflight import check_rows
from areal.utils.tokenizer import load_hf_tokenizer


def trial(tmp_path, capsys, *more: str) -> tuple[int, str, str]:
    argv = ["check", "--trial", recipe_path("arithmetic_grpo.yaml"), *overrides(tmp_path, *more)]
    code = main(argv)
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def test_a_good_config_is_tried_and_nothing_is_written(tmp_path, capsys):
    code, out, _ = trial(tmp_path, capsys)
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == ["rows", "episodes", "prompt", "rewards", "ok:"]
    assert lines[1].startswith("episodes  4 of RLVRWorkflow")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny_model"]


def test_an_agent_talks_to_the_stub(tmp_path, capsys):
    code, out, err = trial(tmp_path, capsys, "workflow=sample_agents.DigitShare")
    assert code == 0, err
    assert "episodes  4 of AgentEpisodes" in out and "prompt  " in out


def test_a_filter_is_asked(tmp_path, capsys):
    """All rewards of the random replies are 0: there is nothing to learn from such a group."""
    options = ("dynamic_filter_fn=keep_mixed_groups", "reward_fn=sample_rewards.exact_match")
    code, out, _ = trial(tmp_path, capsys, *options)
    assert code == 0 and "filter    rejects this group" in out


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("reward_fn=broken_parts.raising_reward", "the judge is out of order"),
        ("reward_fn=broken_parts.text_reward", "a reward must be a number"),
        ("workflow=broken_parts.ReturnsText", "an answer"),
        ("train_dataset.path=broken_parts.messageless_rows", "has no 'messages'"),
    ],
)
def test_what_fails_is_one_line(tmp_path, capsys, override, found):
    code, out, err = trial(tmp_path, capsys, override)
    assert code == 2 and found in err.splitlines()[-1] and "ok:" not in out


def test_an_episode_that_never_ends_is_ended(tmp_path, capsys):
    code, _, err = trial(
        tmp_path, capsys, "workflow=broken_parts.WaitsForEver", "watchdog.seconds=1"
    )
    assert code == 2 and "TimeoutError" in err.splitlines()[-1]


def test_a_few_prompts_that_are_too_long_are_only_told(tmp_path, caplog):
    config = grpo_config(tmp_path)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    rows, _ = load_datasets(config)
    long = {"messages": [{"role": "user", "content": "1" * 300}], "answer": "1"}
    check_rows(config, [long, *rows], tokenizer)
    assert "1 of the first 64 prompts have 256 tokens or more (the longest 300)" in caplog.text
    with pytest.raises(ValueError, match="20 of the first 64"):
        check_rows(config, [long] * 20 + list(rows), tokenizer)
