"""MultiTurnWorkflow with a real engine, a real model and real reward processes."""

from __future__ import annotations

import pytest
import torch
from sample_rewards import right_after_feedback
from tiny import tiny_model, write_tiny_model

from areal.api.config.inference import GenerationHyperparameters
from areal.api.workflow_context import episode
from areal.dataset.arithmetic import build_char_tokenizer
from areal.engine.native.local_engine import NativeLocalEngine
from areal.models.common.attention import PackedAttention
from areal.utils import stats_tracker
from areal.workflow.multi_turn import MultiTurnWorkflow, feedback_ids
from areal.workflow.resolve import find_workflow
from areal.workflow.rlvr import RLVRWorkflow

FEEDBACK = " no! again: "
CHATML = (
    "{% for m in messages %}({{ m.role }}:{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}(assistant:{% endif %}"
)


class RecordingEngine:
    """The engine, with a list of what was asked and answered."""

    def __init__(self, engine):
        self.engine = engine
        self.turns = []

    async def agenerate(self, req):
        response = await self.engine.agenerate(req)
        self.turns.append((list(req.input_ids), list(response.output_tokens)))
        return response


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_char_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def native_engine(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("model")
    engine = NativeLocalEngine(write_tiny_model(folder, vocab_size=len(tokenizer)))
    engine.initialize()
    yield engine
    engine.destroy()


@pytest.fixture
def engine(native_engine):
    return RecordingEngine(native_engine)


@pytest.fixture
def make_workflow(tokenizer):
    made = []

    def make(max_new_tokens=12, max_tokens=400, workflow_class=MultiTurnWorkflow, **kwargs):
        gconfig = GenerationHyperparameters(max_new_tokens=max_new_tokens, max_tokens=max_tokens)
        if workflow_class is MultiTurnWorkflow:
            kwargs.setdefault("feedback", FEEDBACK)
        arguments = {"reward_fn": right_after_feedback, "tokenizer": tokenizer, **kwargs}
        made.append(workflow_class(gconfig=gconfig, **arguments))
        return made[-1]

    yield make
    for workflow in made:
        workflow.close()


def row(num_wrong):
    messages = [{"role": "user", "content": "47+36="}]
    return {"messages": messages, "feedback": FEEDBACK, "num_wrong": num_wrong}


async def run(workflow, engine, num_wrong, task_id=0):
    with episode(task_id=task_id, sample=0, is_eval=False, run_seed=1):
        return await workflow.arun_episode(engine, row(num_wrong))


async def test_retries_until_the_reward_and_discounts_each(make_workflow, engine, tokenizer):
    result = await run(make_workflow(max_turns=5, turn_discount=0.5), engine, num_wrong=2)
    prompt, feedback = tokenizer.encode("47+36="), tokenizer.encode(FEEDBACK)
    replies = [output for _, output in engine.turns]
    assert len(replies) == 3
    segments = [(prompt, -1), (replies[0], 0), (feedback, -1), (replies[1], 1), (feedback, -1)]
    segments.append((replies[2], 2))
    assert result["input_ids"].tolist() == [[token for ids, _ in segments for token in ids]]
    turn_ids = [turn for ids, turn in segments for _ in ids]
    assert result["turn_ids"].tolist() == [turn_ids]
    assert result["loss_mask"].tolist() == [[int(turn >= 0) for turn in turn_ids]]
    assert result["versions"].tolist() == [[0 if turn >= 0 else -1 for turn in turn_ids]]
    assert result["rewards"].tolist() == [0.25]
    assert result["attention_mask"].all()


async def test_a_later_turn_goes_on_from_the_very_tokens_of_the_earlier(make_workflow, engine):
    await run(make_workflow(max_turns=4), engine, num_wrong=3)
    assert len(engine.turns) == 4
    for (asked, answered), (next_asked, _) in zip(engine.turns, engine.turns[1:], strict=False):
        assert next_asked[: len(asked) + len(answered)] == asked + answered


async def test_logprobs_are_those_of_one_pass_over_the_whole(make_workflow, engine, tokenizer):
    result = await run(make_workflow(max_turns=3), engine, num_wrong=2, task_id=4)
    ids = result["input_ids"][0].long()
    model = tiny_model(vocab_size=len(tokenizer))
    attend = PackedAttention(torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
    with torch.no_grad():
        hidden = model(ids, torch.arange(len(ids)), attend)
        whole = model.logits(hidden).log_softmax(-1)
    expected = whole[:-1].gather(1, ids[1:, None]).squeeze(1)
    generated = result["loss_mask"][0, 1:].bool()
    assert generated.sum() > 10
    torch.testing.assert_close(
        result["logprobs"][0, 1:][generated], expected[generated], atol=1e-5, rtol=0
    )
    assert not result["logprobs"][0, 1:][~generated].any()


async def test_the_last_turn_may_be_wrong_too(make_workflow, engine):
    stats_tracker.get("rollout").export()
    result = await run(make_workflow(max_turns=2), engine, num_wrong=9)
    assert len(engine.turns) == 2 and result["rewards"].tolist() == [0.0]
    stats = stats_tracker.get("rollout").export()
    assert stats["rollout/num_turns"] == 2.0 and stats["rollout/reward"] == 0.0


async def test_a_right_first_answer_is_a_single_turn(make_workflow, engine):
    several = await run(make_workflow(max_turns=4, turn_discount=0.5), engine, num_wrong=0)
    single = await run(make_workflow(workflow_class=RLVRWorkflow), engine, num_wrong=0)
    assert set(several) == set(single)
    for key, value in single.items():
        assert torch.equal(several[key], value), key


async def test_no_turn_begins_that_would_not_fit(make_workflow, engine):
    workflow = make_workflow(max_turns=9, max_tokens=40)
    result = await run(workflow, engine, num_wrong=9)
    assert 1 <= len(engine.turns) <= 3
    assert result["input_ids"].shape[1] <= 40


@pytest.mark.parametrize("max_new_tokens", [1, 60])
async def test_the_chat_template_stands_between_turns(
    make_workflow, engine, tmp_path, max_new_tokens
):
    tokenizer = build_char_tokenizer(tmp_path)
    tokenizer.chat_template = CHATML
    workflow = make_workflow(max_new_tokens, tokenizer=tokenizer, max_turns=4)
    await run(workflow, engine, num_wrong=3, task_id=1)
    between = f"<eos>\n(user:{FEEDBACK}<eos>\n(assistant:"
    endings = set()
    for (asked, answered), (next_asked, _) in zip(engine.turns, engine.turns[1:], strict=False):
        ended = answered[-1] == tokenizer.eos_token_id
        endings.add(ended)
        added = tokenizer.decode(next_asked[len(asked) + len(answered) :])
        assert added == (between.removeprefix("<eos>") if ended else between)
    assert (max_new_tokens == 60) in endings  # both ways to end were seen


def test_a_template_without_the_past_is_refused(tmp_path):
    tokenizer = build_char_tokenizer(tmp_path)
    tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(ValueError, match="chat template leaves out earlier turns"):
        feedback_ids("again", tokenizer, enable_thinking=False)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"max_turns": 0}, "workflow_kwargs.max_turns must be at least 1, got 0"),
        ({"turn_discount": 1.5}, "workflow_kwargs.turn_discount must lie between 0 and 1"),
    ],
)
def test_impossible_options_are_refused(make_workflow, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_workflow(**kwargs)


def test_by_name():
    assert find_workflow("multi_turn") is MultiTurnWorkflow
