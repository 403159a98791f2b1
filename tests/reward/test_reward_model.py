"""The reward `reward_model`: the score that the engine which trained it computes."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch
from tiny import write_tiny_model

from areal.api.config.train_engine import OptimizerConfig, TrainEngineConfig
from areal.api.io_struct import FinetuneSpec, SaveLoadMeta
from areal.api.reward_api import AsyncRewardWrapper
from areal.dataset.arithmetic import build_char_tokenizer
from areal.dataset.chat_rows import pair_rows
from areal.engine.train.archon import ArchonEngine
from areal.reward import RewardModel, get_reward_fn
from areal.trainer.learners import RWLearner

PAIRS = [("12+34=", "46", "47"), ("7*8=", "56", "a long miss"), ("1-1=", "0", "")]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(trained reward model, policy it began as, tokenizer, rows, engine)"""
    root = tmp_path_factory.mktemp("reward_model")
    policy = root / "policy"
    tokenizer = build_char_tokenizer(policy)
    write_tiny_model(policy, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    chats = [([{"role": "user", "content": q}], good, bad) for q, good, bad in PAIRS]
    rows = pair_rows(chats, tokenizer, None)
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps_proportion=0.0)
    config = TrainEngineConfig(path=str(policy), is_critic=True, optimizer=optimizer)
    engine = ArchonEngine(config, seed=3)
    engine.initialize(FinetuneSpec(total_train_epochs=9, dataset_size=30, train_batch_size=3))
    learner = RWLearner(engine)
    for _ in range(8):
        learner.train(learner.collate(rows))
    trained = root / "trained"
    engine.save(SaveLoadMeta(path=str(trained), weight_format="hf", tokenizer=tokenizer))
    return trained, policy, tokenizer, rows, engine


def engine_score(engine: ArchonEngine, ids: list[int]) -> float:
    ids_1T = torch.tensor([ids], dtype=torch.int32)
    values = engine.forward({"input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T).bool()})
    return values.flatten()[-1].item()


def test_scores_are_those_of_the_engine(world):
    trained, _, _, rows, engine = world
    reward = RewardModel(str(trained))
    for (question, good, bad), row in zip(PAIRS, rows, strict=True):
        messages = [{"role": "user", "content": question}]
        for reply, ids in ((good, row["chosen_ids"]), (bad, row["rejected_ids"])):
            score = reward("ignored", reply, messages=messages, answer="46")
            assert score == pytest.approx(engine_score(engine, ids), abs=1e-5)


def test_training_told_good_from_bad(world):
    trained, *_ = world
    reward = RewardModel(str(trained))
    for question, good, bad in PAIRS:
        messages = [{"role": "user", "content": question}]
        assert reward("", good, messages=messages) > reward("", bad, messages=messages)


def test_a_row_without_messages_is_scored_by_the_text_of_its_prompt(world):
    trained, _, tokenizer, _, engine = world
    ids = tokenizer("1+1=2", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    expected = engine_score(engine, ids)
    assert RewardModel(str(trained))("1+1=", "2") == pytest.approx(expected, abs=1e-5)


def test_in_the_pool_under_its_limits(world):
    trained, *_ = world
    messages = [{"role": "user", "content": "1-1="}]
    here = RewardModel(str(trained))("", "0", messages=messages)

    async def score(**options) -> float:
        wrapper = AsyncRewardWrapper(
            get_reward_fn("reward_model"),
            timeout_seconds=120,
            max_workers=1,
            max_retries=0,
            options=options,
        )
        try:
            return await wrapper("", "0", [1], [2], messages=messages, path="a column")
        finally:
            wrapper.close()

    there = asyncio.run(score(path=str(trained)))
    assert math.isfinite(there) and there == pytest.approx(here, abs=1e-5)


def test_a_path_that_is_no_folder_is_named():
    with pytest.raises((OSError, ValueError), match=r"nowhere"):
        get_reward_fn("reward_model")("", "0", [], [], path="nowhere")


def test_what_is_no_reward_model_is_named(world, tmp_path):
    _, policy, *_ = world
    with pytest.raises(ValueError, match=r"is no reward model.*trainer: rw"):
        RewardModel(str(policy))("", "0")
    with pytest.raises(ValueError, match=r"reward_kwargs\.options\.path"):
        get_reward_fn("reward_model")("", "0", [], [])
