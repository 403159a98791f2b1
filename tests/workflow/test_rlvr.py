"""RLVRWorkflow with a scripted engine and real reward processes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from sample_rewards import exact_match, of_lists

from areal.api.config.inference import GenerationHyperparameters
from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import ModelResponse, Sample
from areal.api.workflow_context import episode
from areal.dataset.arithmetic import build_char_tokenizer
from areal.sandbox.pool import RewardError
from areal.utils import stats_tracker
from areal.utils.data import concat_padded_tensors
from areal.workflow.chat import ChatTurn, chat_input_ids
from areal.workflow.resolve import find_workflow
from areal.workflow.rlvr import RLVRWorkflow
from areal.workflow.transcript import Transcript, group_trajectory

ROW = {"messages": [{"role": "user", "content": "47+36="}], "answer": "83"}


class ScriptedEngine:
    """Answers every request with one text, at version 5, and keeps the requests."""

    def __init__(self, tokenizer, text, stop_reason="stop"):
        self.tokens = tokenizer.encode(text)
        if stop_reason == "stop":
            self.tokens.append(tokenizer.eos_token_id)
        self.stop_reason = stop_reason
        self.requests = []

    async def agenerate(self, req):
        self.requests.append(req)
        return ModelResponse(
            input_tokens=req.input_ids,
            output_tokens=list(self.tokens),
            output_logprobs=[-0.5] * len(self.tokens),
            output_versions=[5] * len(self.tokens),
            stop_reason=self.stop_reason,
            tokenizer=req.tokenizer,
        )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_char_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def make_workflow(tokenizer):
    made = []

    def make(reward_fn=exact_match, gconfig=None, **kwargs):
        gconfig = gconfig or GenerationHyperparameters(n_samples=8, max_new_tokens=10)
        made.append(RLVRWorkflow(reward_fn, gconfig, tokenizer, **kwargs))
        return made[-1]

    yield make
    for workflow in made:
        workflow.close()


async def test_an_episode_becomes_a_trajectory(make_workflow, tokenizer):
    engine = ScriptedEngine(tokenizer, "83")
    result = await make_workflow().arun_episode(engine, ROW)
    prompt, output = tokenizer.encode("47+36="), [*tokenizer.encode("83"), tokenizer.eos_token_id]
    expected = {
        "input_ids": ([prompt + output], torch.int32),
        "attention_mask": ([[True] * 9], torch.bool),
        "loss_mask": ([[0] * 6 + [1] * 3], torch.int32),
        "logprobs": ([[0.0] * 6 + [-0.5] * 3], torch.float32),
        "versions": ([[-1] * 6 + [5] * 3], torch.int32),
        "turn_ids": ([[-1] * 6 + [0] * 3], torch.int32),
        "rewards": ([1.0], torch.float32),
        "seq_no_eos": ([False], torch.bool),
    }
    assert set(result) == set(expected)
    for key, (values, dtype) in expected.items():
        assert result[key].dtype == dtype, key
        assert result[key].tolist() == values, key


async def test_the_request_has_one_sample_the_stop_ids_and_the_episodes_seed(
    make_workflow, tokenizer
):
    engine, workflow = ScriptedEngine(tokenizer, "83"), make_workflow()
    for _ in range(2):
        with episode(task_id=3, sample=1, is_eval=False, run_seed=7):
            await workflow.arun_episode(engine, dict(ROW))
    with episode(task_id=3, sample=2, is_eval=False, run_seed=7):
        await workflow.arun_episode(engine, dict(ROW))
    first, again, other = (request.gconfig for request in engine.requests)
    assert first.n_samples == 1
    assert first.stop_token_ids == [tokenizer.pad_token_id, tokenizer.eos_token_id]
    assert first.seed is not None
    assert first.seed == again.seed != other.seed
    assert engine.requests[0].rid != engine.requests[1].rid


async def test_a_seed_of_the_config_is_kept(make_workflow, tokenizer):
    engine = ScriptedEngine(tokenizer, "83")
    workflow = make_workflow(gconfig=GenerationHyperparameters(max_new_tokens=4, seed=11))
    with episode(task_id=0, sample=0, is_eval=True, run_seed=7):
        await workflow.arun_episode(engine, ROW)
    assert engine.requests[0].gconfig.seed == 11


async def test_an_answer_cut_by_length_is_marked(make_workflow, tokenizer):
    result = await make_workflow().arun_episode(ScriptedEngine(tokenizer, "83", "length"), ROW)
    assert result["seq_no_eos"].tolist() == [True]
    assert result["rewards"].tolist() == [1.0]  # the text is the same


async def test_an_aborted_generation_is_a_failure_not_a_sample(make_workflow, tokenizer):
    with pytest.raises(RuntimeError, match="aborted after 2 tokens"):
        await make_workflow().arun_episode(ScriptedEngine(tokenizer, "83", "abort"), ROW)


async def test_a_reward_that_raises_is_a_failure_not_a_zero(make_workflow, tokenizer):
    workflow = make_workflow(reward_kwargs={"max_retries": 0})
    row = {"messages": ROW["messages"]}  # exact_match misses its answer
    with pytest.raises(RewardError, match="argument: 'answer'; data here: messages"):
        await workflow.arun_episode(ScriptedEngine(tokenizer, "83"), row)


async def test_the_prompt_is_tokenised_once_for_a_group(make_workflow, tokenizer):
    calls = []

    def get_input_ids(messages, tokenizer, enable_thinking):
        calls.append((messages, enable_thinking))
        return tokenizer.encode(messages[0]["content"])

    workflow = make_workflow(get_input_ids_fn=get_input_ids, enable_thinking=True)
    for _ in range(8):
        await workflow.arun_episode(ScriptedEngine(tokenizer, "83"), dict(ROW))
    assert calls == [(ROW["messages"], True)]


async def test_a_row_of_another_shape(make_workflow, tokenizer):
    workflow = make_workflow(
        data_extract_prompt_fn=lambda row: [{"role": "user", "content": row["prompt"]}]
    )
    engine = ScriptedEngine(tokenizer, "4")
    # `prompt` is also an argument of the reward function: the workflow's own text goes there
    result = await workflow.arun_episode(engine, {"prompt": "2+2=", "answer": "4"})
    assert tokenizer.decode(engine.requests[0].input_ids) == "2+2="
    assert result["rewards"].tolist() == [1.0]
    with pytest.raises(ValueError, match="needs the key 'messages' .* found prompt, answer"):
        await make_workflow().arun_episode(engine, {"prompt": "2+2=", "answer": "4"})


async def test_rewards_are_counted_in_the_scope_of_the_episode(make_workflow, tokenizer):
    workflow = make_workflow()
    for name in ("rollout", "eval-rollout"):
        stats_tracker.get(name).export()
    with episode(task_id=0, sample=0, is_eval=True, run_seed=1):
        await workflow.arun_episode(ScriptedEngine(tokenizer, "83"), ROW)
    assert stats_tracker.get("eval-rollout").export()["eval-rollout/reward"] == 1.0
    assert "rollout/reward" not in stats_tracker.get("rollout").export()


async def test_a_batch_of_episodes_costs_little(make_workflow, tokenizer):
    workflow, engine = make_workflow("gsm8k"), ScriptedEngine(tokenizer, "38>83")
    costs = []
    for _ in range(5):
        began = time.process_time()  # not that of the reward's process
        results = await asyncio.gather(*(workflow.arun_episode(engine, ROW) for _ in range(128)))
        costs.append((time.process_time() - began) / 128)
        assert all(result["rewards"].tolist() == [1.0] for result in results)
    assert min(costs) < 0.5e-3


def test_tokenizer_by_path_and_errors_of_names(tokenizer, tmp_path):
    build_char_tokenizer(tmp_path)
    gconfig = GenerationHyperparameters(max_new_tokens=4)
    workflow = find_workflow("rlvr")("gsm8k", gconfig, str(tmp_path))
    assert workflow.tokenizer.eos_token_id == tokenizer.eos_token_id
    workflow.close()
    with pytest.raises(ValueError, match="reward_fn: unknown name 'gsm8'.*did you mean 'gsm8k'"):
        RLVRWorkflow("gsm8", gconfig, tokenizer)
    with pytest.raises(ValueError, match="reward_fn: cannot import 'no_such_module.fn'"):
        RLVRWorkflow("no_such_module.fn", gconfig, tokenizer)
    with pytest.raises(ValueError, match="workflow: unknown name 'rlrv'"):
        find_workflow("rlrv")
    with pytest.raises(ValueError, match="neither a RolloutWorkflow nor an agent"):
        find_workflow("areal.workflow.chat.messages_of")


@pytest.mark.parametrize("reward_fn", [of_lists, "sample_rewards.of_lists"])
def test_a_reward_of_another_signature_is_refused_before_any_episode(make_workflow, reward_fn):
    with pytest.raises(
        ValueError, match=r"cannot be called as fn\(prompt, completions, prompt_ids"
    ):
        make_workflow(reward_fn)


def test_an_empty_output_is_still_a_trajectory():
    transcript = Transcript([1, 2])
    transcript.add_reply(ModelResponse([1, 2], [], [], [], "length"))
    assert transcript.trajectory(0.0)["loss_mask"].tolist() == [[0, 0]]


class GroupEngine(ScriptedEngine):
    agenerate_group = InferenceEngine.agenerate_group


async def test_a_group_is_what_its_episodes_are(make_workflow, tokenizer):
    engine, workflow = GroupEngine(tokenizer, "83"), make_workflow()
    with episode(task_id=3, sample=0, is_eval=False, run_seed=7):
        group = await workflow.arun_group(engine, dict(ROW), 3)
    of_group = [request.gconfig.seed for request in engine.requests]
    rows = []
    for sample in range(3):
        with episode(task_id=3, sample=sample, is_eval=False, run_seed=7):
            rows.append(await workflow.arun_episode(engine, dict(ROW)))
    assert [request.gconfig.seed for request in engine.requests[3:]] == of_group
    assert group.failures == {}
    for key, value in concat_padded_tensors(rows).items():
        assert (
            torch.equal(group.trajectory[key], value) and group.trajectory[key].dtype == value.dtype
        )


async def test_a_failure_of_a_group_is_that_of_its_sample(make_workflow, tokenizer):
    class Partly(GroupEngine):
        async def agenerate(self, req):
            if len(self.requests) == 1:
                self.requests.append(req)
                raise OSError("connection reset")
            return await super().agenerate(req)

    result = await make_workflow().arun_group(Partly(tokenizer, "83"), dict(ROW), 3)
    assert result.trajectory["rewards"].tolist() == [1.0, 1.0]
    assert {i: type(error) for i, error in result.failures.items()} == {1: OSError}
    engine = GroupEngine(tokenizer, "83", "abort")
    result = await make_workflow().arun_group(engine, dict(ROW), 2)
    assert result.trajectory is None and len(result.failures) == 2
    assert "aborted after 2 tokens" in str(result.failures[0])
    workflow = make_workflow(reward_kwargs={"max_retries": 0})
    row = {"messages": ROW["messages"]}  # exact_match misses its answer
    result = await workflow.arun_group(GroupEngine(tokenizer, "83"), row, 2)
    assert [type(error) for error in result.failures.values()] == [RewardError] * 2


async def test_prompts_of_one_tick_are_tokenised_together_and_fail_alone(make_workflow, tokenizer):
    workflow, engine = make_workflow(), ScriptedEngine(tokenizer, "83")
    rows = [
        {"messages": [{"role": "user", "content": f"{i}+1="}], "answer": "83"} for i in range(9)
    ]
    rows[4] = {"messages": 7, "answer": "83"}
    results = await asyncio.gather(
        *(workflow.arun_episode(engine, row) for row in rows), return_exceptions=True
    )
    assert [i for i, one in enumerate(results) if isinstance(one, Exception)] == [4]
    texts = {tokenizer.decode(request.input_ids) for request in engine.requests}
    assert texts == {f"{i}+1=" for i in range(9) if i != 4}


@pytest.mark.parametrize("has_experts", [False, True])
@pytest.mark.parametrize("lengths", [[1], [3, 1, 2], [5, 5]])
def test_the_trajectory_of_a_group_is_its_padded_samples(lengths, has_experts):
    samples, rows = [], []
    for n in lengths:
        reply = ModelResponse([1, 2], [3] * n, [-0.1] * n, [4] * n, "length" if n == 1 else "stop")
        if has_experts:
            routed = np.arange((n + 1) * 4, dtype=np.uint8).reshape(n + 1, 2, 2)
            reply = replace(reply, routed_experts=routed)
        samples.append(Sample.of(reply))
        transcript = Transcript([1, 2])
        transcript.add_reply(reply)
        rows.append(transcript.trajectory(float(n)))
    group = group_trajectory([1, 2], samples, [float(n) for n in lengths])
    expected = concat_padded_tensors(rows)
    assert group.keys() == expected.keys()
    real = group["attention_mask"]
    for key, value in group.items():
        assert value.dtype == expected[key].dtype and value.shape == expected[key].shape
        # Experts of padding are none in one, and 0 in the other.
        rows = real if key == "routed_experts" else ...
        assert torch.equal(value[rows], expected[key][rows])


def test_prompts_of_a_loop_that_was_closed_are_tokenised_on_the_next(tokenizer):
    """A loop can end between the asking and the answer; another then asks for the same prompt."""
    turn = ChatTurn(exact_match, GenerationHyperparameters(), tokenizer)
    row = {"messages": [{"role": "user", "content": "1+1="}]}
    first = asyncio.new_event_loop()
    asking = first.create_task(turn.prompt(row))
    first.call_soon(first.stop)
    first.run_forever()
    assert not asking.done()
    try:
        second = asyncio.wait_for(turn.prompt(row), timeout=900)
        assert asyncio.run(second).ids == chat_input_ids(row["messages"], tokenizer, False)
    finally:
        turn.close()
        asking.cancel()
        first.run_until_complete(asyncio.gather(asking, return_exceptions=True))
        first.close()
