"""A workflow as AReaL's guide writes it, on the native engine."""

from __future__ import annotations

import pytest
import torch
from documented import MyWorkflow, mine_reward_fn
from tiny import write_tiny_model

from areal import RolloutController
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.api.io_struct import ModelRequest
from areal.api.workflow_api import RolloutWorkflow
from areal.dataset.arithmetic import build_char_tokenizer
from areal.engine.native.local_engine import NativeLocalEngine
from areal.rollout.tasks import TaskFailedError

ROW = {"messages": [{"role": "user", "content": "2+2="}], "answer": "4"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_char_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def engine(tokenizer, tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=len(tokenizer))
    config = InferenceEngineConfig(request_retries=0)
    controller = RolloutController(NativeLocalEngine(folder), config)
    controller.initialize()
    yield controller
    controller.destroy()


@pytest.fixture(scope="module")
def workflow(tokenizer):
    """One for all tests: its reward process imports what the guide's file does, torch too."""
    gconfig = GenerationHyperparameters(max_new_tokens=4)
    workflow = MyWorkflow(gconfig, tokenizer, mine_reward_fn)
    yield workflow
    workflow.async_reward_fn.close()


def test_what_it_returns_cannot_be_trained_on_and_the_error_says_why(engine, workflow):
    with pytest.raises(TaskFailedError, match="attention_mask"):
        engine.rollout_batch([ROW], workflow)


def test_the_workflow_of_the_guide_runs_and_with_the_documented_tensors_trains(engine, workflow):
    results = []

    class Trained(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            found = await workflow.arun_episode(engine, data)
            results.append(found)
            ids = torch.cat([found["input_ids"], found["output_ids"]])[None].int()
            generated = torch.arange(ids.shape[1])[None] >= len(found["input_ids"])
            return {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids, dtype=torch.bool),
                "loss_mask": generated.int(),
                "logprobs": torch.zeros(ids.shape),
                "versions": generated.int() - 1,
                "rewards": found["reward"].reshape(1),
            }

    (trajectory,) = engine.rollout_batch([ROW], Trained(), group_size=2)
    assert trajectory["rewards"].shape == (2,) and len(results) == 2
    for result in results:
        assert set(result) == {"input_ids", "output_ids", "reward"}
        assert result["reward"] in (0.0, 1.0) and 1 <= len(result["output_ids"]) <= 4


def test_a_dict_in_place_of_token_ids_is_explained(tokenizer):
    encoded = tokenizer.apply_chat_template(ROW["messages"], tokenize=True)
    with pytest.raises(ValueError, match="input_ids: .*return_dict=False"):
        ModelRequest(input_ids=list(encoded))
