"""A run whose rewards never differ says so, and why it matters."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from config_files import load
from scripted_engine import ScriptedEngine
from tiny_tokenizer import byte_tokenizer

from areal.api.io_struct import EPISODE_KEY
from areal.api.workflow_api import RolloutWorkflow
from areal.trainer.episodes import RewardSpread, build_workflow


def groups(*rewards: list[float]) -> list[dict[str, torch.Tensor]]:
    return [{"rewards": torch.tensor(group)} for group in rewards]


def test_share_of_the_groups_with_different_rewards():
    spread = RewardSpread()
    assert spread.share(groups([0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.5, 1.0])) == 0.5
    assert spread.share(groups([0.0, 0.0], [1.0, 1.0])) == 0
    # One sample a prompt: there is a batch to compare with.
    assert spread.share(groups([0.0], [1.0])) == 1
    assert spread.share(groups([1.0], [1.0])) == 0


def test_rewards_are_those_of_the_workflow():
    """Normalised ones differ by rounding at most where the workflow's are equal."""
    group = {"rewards": torch.tensor([0.0, 1e-8]), "original_rewards": torch.tensor([1.0, 1.0])}
    assert RewardSpread().share([group]) == 0


def test_rows_of_one_episode_are_one_sample():
    """An agent's requests may have rewards of their own; the estimator compares episodes."""
    group = {"rewards": torch.tensor([0.0, 1.0, 1.0, 0.0]), EPISODE_KEY: torch.tensor([0, 0, 1, 1])}
    assert RewardSpread().share([group]) == 0
    group[EPISODE_KEY] = torch.tensor([0, 1, 1, 0])
    assert RewardSpread().share([group]) == 1


@pytest.mark.parametrize(
    ("rewards", "found"), [(([0.0] * 4, [0.0] * 4), "all 0"), (([0.0] * 4, [1.0] * 4), "equal")]
)
def test_says_so_after_a_while_and_then_seldom(caplog, rewards, found):
    spread = RewardSpread(patience=3)
    with caplog.at_level(logging.WARNING, logger="areal"):
        warned = []
        for step in range(1, 13):
            spread.share(groups(*rewards))
            if len(caplog.records) > len(warned):
                warned.append(step)
    assert warned == [3, 6, 12]
    assert "learns nothing" in caplog.text and found in caplog.text


def test_a_difference_begins_the_count_anew(caplog):
    spread = RewardSpread(patience=3)
    with caplog.at_level(logging.WARNING, logger="areal"):
        for _ in range(5):
            spread.share(groups([0.0, 0.0]))
            spread.share(groups([0.0, 0.0]))
            spread.share(groups([0.0, 1.0]))
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "num_turns"),
    [
        ([], 3),
        (["gconfig.max_tokens=40"], 1),
        (["rollout.backend=vllm:d1", "vllm.max_model_len=40"], 1),
    ],
)
async def test_episodes_end_where_the_context_of_the_servers_does(tmp_path, changes, num_turns):
    options = ["workflow=env", "env=sample_envs.Count", f"actor.path={tmp_path}", *changes]
    config = load(tmp_path, "ppo", *options)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}({{ m.role }}:{{ m.content }}<|eos|>\n{% endfor %}"
        "{% if add_generation_prompt %}(assistant:{% endif %}"
    )
    for max_context, expected in ((4096, 3), (80, 2), (40, 1)):
        hf_config = {"model_type": "qwen3", "max_position_embeddings": max_context}
        (tmp_path / "config.json").write_text(json.dumps(hf_config))
        workflow = build_workflow(config, tokenizer, None, None, is_eval=False)
        engine = ScriptedEngine(tokenizer, ["1", "2", "3"])
        await workflow.arun_episode(engine, {"seed": 5})
        assert len(engine.asked) == min(expected, num_turns)
        assert max(len(tokenizer(text)["input_ids"]) for text in engine.asked) < max_context


class WithOptions(RolloutWorkflow):
    """Has generation options of its own kind."""

    def __init__(self, gconfig, tokenizer, reward_fn) -> None:
        self.gconfig = gconfig

    async def arun_episode(self, engine, data):
        return None


def test_options_of_a_workflow_of_ones_own_are_left_as_they_are(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 40}')
    config = load(tmp_path, "ppo", f"actor.path={tmp_path}")
    given = {"gconfig": {"top_p": 0.5}}
    workflow = build_workflow(config, byte_tokenizer(), WithOptions, given, is_eval=False)
    assert isinstance(workflow, WithOptions) and workflow.gconfig == {"top_p": 0.5}
