"""Episodes of agents: sessions, rewards and samples, in the loop and in processes of their own."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

import pytest
import sample_agents
import torch
from agent_world import ScriptedEngine
from openai import APIConnectionError
from sample_agents import Broken, ByRow, Silent, Turns
from tiny import tiny_model

from areal.agents.session import AgentError, AgentTimeoutError
from areal.api.config.inference import ProcessLimits
from areal.models.common.attention import PackedAttention
from areal.utils import stats_tracker

LIMITS = {"session_timeout_seconds": 10.0, "subproc_max_workers": 1}


@pytest.fixture(scope="module")
def run_in(world):
    """`run_in(mode)("Turns", num_turns=3)`: one episode of that agent. Processes start once."""
    with ExitStack() as stack:
        config = {"chat_template_type": "concat", "turn_discount": 0.5, **LIMITS}
        workflows = {
            mode: stack.enter_context(world.open(ByRow, mode=mode, **config))
            for mode in ("inline", "subproc")
        }

        def runner(mode):
            flow = workflows[mode]
            return lambda agent, **kw: world.episode(flow, {"agent": agent, "kwargs": kw})

        yield runner


@pytest.fixture(params=["inline", "subproc"])
def run(request, run_in):
    return run_in(request.param)


def rows_of(interactions):
    return [item.to_tensor_dict() for item in interactions.values()]


def test_every_completion_is_a_sample(run, world):
    interactions = run("Turns")
    assert [item.reward for item in interactions.values()] == [0.5, 1.0]
    first, second = (item.model_response for item in interactions.values())
    prompt = "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"
    assert world.tokenizer.decode(first.input_tokens) == prompt
    assert second.input_tokens[: first.input_len] == first.input_tokens
    assert 0 < first.output_len <= 6 and set(first.output_versions) == {0}


def test_rewards_by_completion(run):
    assert [item.reward for item in run("ByCompletion").values()] == [3.0, 0.0]


@pytest.mark.parametrize(
    "how, error",
    [
        ("none", "must return a reward .* got None"),
        ("nan", "a reward must be a finite number, got nan"),
        ("text", "must return a reward .* got '1.0'"),
        ("unknown", "no completion 'x' in this session"),
        ("raise", "the agent lost its way"),
    ],
)
def test_a_failure_is_never_a_reward(run, how, error):
    with pytest.raises(Exception, match=error):
        run("Broken", how=how)


def test_an_agent_that_hangs_is_ended(run):
    with pytest.raises(AgentTimeoutError, match="ByRow did not finish within 10 s"):
        run("Broken", how="hang")
    assert len(run("Turns")) == 2, "the next episode is not hurt"


@pytest.fixture
def subproc(run_in):
    return run_in("subproc")


def test_a_process_has_the_variables_of_the_sdks(subproc):
    rewards = [item.reward for _ in range(2) for item in subproc("FromEnvironment").values()]
    assert rewards[0] == rewards[1] != os.getpid(), "one process runs one episode after the other"
    assert os.environ.get("OPENAI_BASE_URL") is None


def test_a_crash_ends_its_own_episode_only(subproc):
    with pytest.raises(AgentError, match="ByRow ended with exit code 3"):
        subproc("Broken", how="exit")
    assert len(subproc("Turns")) == 2


def test_an_agent_with_limits_works_and_reaches_nothing_else(world, monkeypatch):
    for name in ("OPENAI_KEY", "GH_PAT", "NOBODY_THOUGHT_OF_THIS"):
        monkeypatch.setenv(name, "swordfish")
    interactions = world.run(sample_agents.Spy, mode="subproc", limits=ProcessLimits())
    assert [item.reward for item in interactions.values()] == [0.0]


def test_an_agent_that_cannot_travel(world):
    class Local:
        async def run(self, data, **extra):
            return 1.0

    with pytest.raises(ValueError, match="Local cannot be sent to another process"):
        world.run(Local, mode="subproc")


# Samples.


def test_a_template_of_its_own_for_every_turn(world):
    first, second = rows_of(world.run(Turns, chat_template_type="hf"))
    text = world.tokenizer.decode(second["input_ids"][0])
    assert "<|im_end|>\n<|im_start|>user\nagain 0<|im_end|>\n<|im_start|>assistant\n" in text
    assert first["turn_ids"].max() == second["turn_ids"].max() == 0
    assert second["loss_mask"].sum() <= 6


def test_a_chat_is_one_sample_of_the_tokens_that_were_sampled(world):
    interactions = world.run(sample_agents.turns, export_style="concat")
    (leaf,) = interactions.values()
    (row,) = rows_of(interactions)
    assert row["rewards"].tolist() == [1.0]
    assert sorted(set(row["turn_ids"][0].tolist())) == [-1, 0, 1, 2]
    for turn, interaction in enumerate(leaf.path()):
        own = row["turn_ids"][0] == turn
        reply = interaction.model_response
        assert row["input_ids"][0][own].tolist() == reply.output_tokens
        assert torch.equal(row["logprobs"][0][own], torch.tensor(reply.output_logprobs))
    text = world.tokenizer.decode(row["input_ids"][0])
    assert text.count("<|im_end|>\n<|im_start|>user\nagain") == 2


def test_logprobs_are_those_of_the_model_on_the_whole_chat(world):
    """A chat of several calls is trained on as one sequence: one forward pass must agree."""
    (row,) = rows_of(world.run(Turns, export_style="concat"))
    tokenizer = world.tokenizer
    model = tiny_model(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_position_embeddings=2048,
    )
    ids = row["input_ids"][0].long()
    attend = PackedAttention(torch.tensor([0, len(ids)]), len(ids))
    with torch.no_grad():
        logits = model.logits(model(ids, torch.arange(len(ids)), attend))
    expected = logits.float().log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1)
    generated = row["loss_mask"][0].bool()[1:]
    assert torch.allclose(row["logprobs"][0][1:][generated], expected[generated], atol=1e-4)


def test_the_same_episode_draws_the_same_tokens(world):
    one, two = (
        [item.model_response.output_tokens for item in world.run(Turns).values()] for _ in range(2)
    )
    assert one == two
    assert one[0] != one[1], "the calls of an episode draw their own"


def test_retry_orphans_are_left_out_when_asked(world):
    class Twice:
        async def run(self, data, **extra):
            await Turns(1).run(data, **extra)
            return await Turns(2).run(data, **extra)

    assert len(world.run(Twice)) == 3
    assert len(world.run(Twice, drop_retry_orphans=True)) == 2


def test_a_matcher_of_ones_own(world):
    kept = world.run(Turns, export_style="concat", prefix_matcher="sample_agents.never_continues")
    assert len(kept) == 2, "no chat goes on, so each call is a sample of its own"


# What is not data.


def test_an_agent_that_never_asks_has_no_sample(world):
    with pytest.raises(ValueError, match="no completion to reward"):
        world.run(Silent)


def test_what_an_agent_makes_of_a_broken_model_is_not_data(world):
    class Forgiving:
        """Takes an error for a wrong answer."""

        async def run(self, data, **extra):
            try:
                await Turns(2).run(data, **extra)
            except Exception:
                return 0.0

    engine = ScriptedEngine(world.tokenizer, "fine", RuntimeError("the server is gone"))
    with pytest.raises(AgentError, match="server's side: RuntimeError: the server is gone"):
        world.run(Forgiving, engine=engine)


def test_a_healed_failure_is_forgotten(world):
    class Stubborn:
        async def run(self, data, **extra):
            try:
                await Turns(1).run(data, **extra)
            except Exception:
                return await Turns(1).run(data, **extra)

    engine = ScriptedEngine(world.tokenizer, RuntimeError("a hiccup"), "fine")
    (item,) = world.run(Stubborn, engine=engine).values()
    assert item.output_message_list[0]["content"] == "fine"


# The end.


def test_a_closed_workflow_runs_nothing(world):
    with world.open(Broken, {"how": "hang"}) as workflow:
        running = world.start(workflow)
        time.sleep(0.3)
        running.cancel()
    with pytest.raises(RuntimeError, match="is closed"):
        world.episode(workflow)


def test_a_key_ends_with_its_episode(world):
    keys = {}

    class Keeper:
        async def run(self, data, **extra):
            keys.update(base_url=extra["base_url"], api_key=extra["api_key"])
            return await Turns(1).run(data, **extra)

    with world.open(Keeper) as workflow:
        world.episode(workflow)
        with pytest.raises(Exception, match="401"):
            world.runner.run(Turns(1).run({}, **keys)).result(300)
    with pytest.raises(APIConnectionError):
        world.runner.run(Turns(1).run({}, **keys)).result(300)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tool_call_parser": "xml"}, "tool_call_parser: unknown name 'xml'"),
        ({"reasoning_parser": "xml"}, "reasoning_parser: unknown name 'xml'; expected one of auto"),
        ({"prefix_matcher": "math.nothing"}, "rollout.agent.prefix_matcher: module 'math'"),
    ],
)
def test_bad_options_are_named(world, changes, message):
    with pytest.raises(ValueError, match=message):
        world.run(Turns, **changes)


def test_a_template_that_drops_earlier_turns_begins_a_branch(world, template):
    """Its tokens cannot be continued, so the second call is a dialogue of its own."""
    template("{{ messages[-1].content }}")
    stats_tracker.get("rollout").export()
    first, second = world.run(Turns, export_style="concat").values()
    assert first.parent is None and second.parent is None
    assert world.tokenizer.decode(second.model_response.input_tokens) == "again 0"
    stats = stats_tracker.get("rollout").export()
    assert stats["rollout/num_branches"] == 1.0 and stats["rollout/num_turns"] == 2.0
