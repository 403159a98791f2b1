"""EnvWorkflow: what the model is shown, what it is trained on, and what a failure is."""

from __future__ import annotations

import pytest
import sample_envs
from scripted_engine import ScriptedEngine
from tiny_tokenizer import byte_tokenizer

from areal.api.config.inference import GenerationHyperparameters
from areal.environments.interface import EnvError
from areal.utils import stats_tracker
from areal.workflow.env import EnvWorkflow
from areal.workflow.resolve import find_workflow

CHAT = (
    "{% if tools %}[{% for t in tools %}{{ t.function.name }} {% endfor %}<tool_call>]{% endif %}"
    "{% for m in messages %}({{ m.role }}:{{ m.content }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}(assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer


def workflow(env, tokenizer, max_tokens=4096, **kwargs):
    gconfig = GenerationHyperparameters(max_new_tokens=64, max_tokens=max_tokens)
    return EnvWorkflow(env, gconfig, tokenizer, **kwargs)


async def play(env, tokenizer, replies, row=None, **kwargs):
    engine = ScriptedEngine(tokenizer, replies)
    result = await workflow(env, tokenizer, **kwargs).arun_episode(engine, row or {"seed": 5})
    return result, engine.asked


async def test_rewards_of_all_turns_add_up_and_only_replies_are_trained_on(tokenizer):
    result, asked = await play("sample_envs.Count", tokenizer, ["1", "no", "3"])
    first = "(user:seed 5: 1<|eos|>\n(assistant:"
    second = first + "1<|eos|>\n(user: next 2<|eos|>\n(assistant:"
    assert asked == [first, second, second + "no<|eos|>\n(user: next 3<|eos|>\n(assistant:"]
    assert result["rewards"].tolist() == [12.0]
    ids, mask = result["input_ids"][0], result["loss_mask"][0].bool()
    assert tokenizer.decode(ids[mask]) == "1<|eos|>no<|eos|>3<|eos|>"
    assert tokenizer.decode(ids) == asked[-1] + "3<|eos|>"
    assert set(result["versions"][0][mask].tolist()) == {3}
    assert set(result["versions"][0][~mask].tolist()) == {-1}
    assert result["turn_ids"][0].max() == 2


async def test_an_environment_is_closed_after_each_episode(tokenizer):
    before = sample_envs.Count.closed
    await play(sample_envs.Count, tokenizer, ["1"], env_kwargs={"last": 1})
    with pytest.raises(EnvError):
        await play(sample_envs.Misbehaving, tokenizer, ["1"], {"fault": "raises"})
    assert sample_envs.Count.closed == before + 2


async def test_plain_functions_and_chats(tokenizer):
    result, asked = await play(sample_envs.Blocking, tokenizer, ["ok"])
    assert asked == ["(system:be brief.<|eos|>\n(user:go<|eos|>\n(assistant:"]
    assert result["rewards"].tolist() == [1.0]


def call(name, **arguments):
    import json

    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{written}</tool_call>"


async def test_tools_are_called_and_their_results_shown(tokenizer):
    stats_tracker.get("rollout").export()
    replies = [call("price", item="apple", count=2), "they cost 6"]
    result, asked = await play(sample_envs.Shop, tokenizer, replies)
    assert asked[0].startswith("[price stock broken <tool_call>](user:how much")
    assert asked[1].endswith("<|eos|>\n(tool:6<|eos|>\n(assistant:")
    assert result["rewards"].tolist() == [1.0]
    assert stats_tracker.get("rollout").export()["rollout/num_tool_calls"] == 1


@pytest.mark.parametrize(
    "written, answer",
    [
        (call("prize", item="x"), "error: there is no tool 'prize'; tools are price, stock"),
        (call("price"), "error: price needs the argument 'item'"),
        (call("price", item="x", colour="red"), "error: price has no argument 'colour'"),
        (call("price", item=3), "error: price: the argument 'item' must be of type string"),
        (call("price", item="x", count=True), "error: price: the argument 'count' must be of type"),
        (call("stock", item="pears"), "error: no pears here"),
        (f"<think>{call('price', item='x')}</think>fine", None),
    ],
)
async def test_what_the_model_does_wrong_is_told_to_the_model(tokenizer, written, answer):
    _, asked = await play(sample_envs.Shop, tokenizer, [written, "6"])
    if answer is None:  # a call inside of its reasoning is none
        assert len(asked) == 1
    else:
        assert f"(tool:{answer}" in asked[1]


async def test_a_tool_that_breaks_fails_the_episode(tokenizer):
    with pytest.raises(EnvError, match="tool broken raised OSError: the shop burnt down"):
        await play(sample_envs.Shop, tokenizer, [call("broken")])


@pytest.mark.parametrize(
    "fault, message",
    [
        ("reset", "Misbehaving: reset raised KeyError: 'level'"),
        ("silent", "reset returned no observation"),
        ("raises", "step raised TimeoutError: its own database"),
        ("hangs", "step took longer than 0.2 s"),
        ("two values", r"step must return \(observation, reward, done\), got"),
        ("nan", "step must return a finite reward, got nan"),
        ("huge", "step must return a finite reward, got 1000"),
        ("done", "step must return done as True or False, got None"),
        ("observation", "must return a text or a list of chat messages as observation, got 7"),
    ],
)
async def test_a_failure_is_never_a_reward(tokenizer, fault, message):
    timeout_s = 0.2 if fault == "hangs" else 900.0
    with pytest.raises(EnvError, match=message):
        await play(sample_envs.Misbehaving, tokenizer, ["1"], {"fault": fault}, timeout_s=timeout_s)


async def test_an_episode_ends_at_max_turns_and_where_the_next_turn_does_not_fit(tokenizer):
    result, asked = await play(sample_envs.Count, tokenizer, ["1", "2"], max_turns=2)
    assert len(asked) == 2 and result["rewards"].tolist() == [2.0]
    result, asked = await play(sample_envs.Count, tokenizer, ["1", "2"], max_tokens=40)
    assert len(asked) == 1 and result["rewards"].tolist() == [1.0]
    assert result["input_ids"].shape[1] <= 40


async def test_environments_of_gymnasium_and_skyrl_run(tokenizer):
    result, asked = await play(sample_envs.Gym, tokenizer, ["go", "stop"])
    assert "(user:seed 5<|eos|>" in asked[0] and result["rewards"].tolist() == [1.0]
    row = {"messages": [{"role": "user", "content": "2+2"}], "truth": "4"}
    hint = {"env_kwargs": {"hint": "no"}}
    result, asked = await play(sample_envs.Skyrl, tokenizer, ["5", "4"], row, **hint)
    assert asked[1].endswith("(user:no<|eos|>\n(assistant:") and result["rewards"].tolist() == [1.0]


@pytest.mark.parametrize(
    "env, kwargs, message",
    [
        ("nowhere.Env", {}, "env: cannot import 'nowhere.Env'"),
        ("sample_envs.Count", {"env_kwargs": {"first": 1}}, "env_kwargs do not fit sample_envs.Co"),
        ("sample_envs.Count", {"max_turns": 0}, "workflow_kwargs.max_turns must be above 0"),
    ],
)
def test_mistakes_are_named(tokenizer, env, kwargs, message):
    with pytest.raises(ValueError, match=message):
        workflow(env, tokenizer, **kwargs)


async def test_a_template_without_tool_messages_is_refused(tokenizer):
    tokenizer.chat_template = CHAT.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}")
    try:
        with pytest.raises(ValueError, match="leaves out messages of role 'tool'"):
            await play(sample_envs.Shop, tokenizer, [call("price", item="x")])
    finally:
        tokenizer.chat_template = CHAT


def test_by_name():
    assert find_workflow("env") is EnvWorkflow
