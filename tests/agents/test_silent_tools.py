"""A run whose agents have tools that the model never calls says so, once."""

from __future__ import annotations

import pytest
from agent_world import Does, ScriptedEngine
from sample_agents import QUESTION, ask

from areal.agents.silent_tools import PATIENCE, SilentTools
from areal.api.interaction import InteractionWithTokenLogpReward
from areal.api.io_struct import ModelResponse

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture
def episodes(world, caplog):
    """`episodes(texts, tools)`: one episode per text, and the warnings since."""
    tools = []

    async def act(client, extra):
        await ask(client, QUESTION, **({"tools": tools} if tools else {}))

    with world.open(Does(act)) as workflow:

        def run(texts, given):
            tools[:] = given
            caplog.clear()
            engine = ScriptedEngine(world.tokenizer, *texts)
            for _ in range(len(texts)):
                world.episode(workflow, engine=engine)
            return [text for text in caplog.messages if "NEVER CALLED" in text]

        yield run


def test_tools_that_are_never_called_are_told_once(episodes):
    lost = "<function=add><parameter=a>2</parameter></function>"  # not the template's format
    assert episodes([lost] * (PATIENCE - 1), [ADD]) == []
    assert episodes(["no tools, no matter"] * 3, []) == []
    (warning,) = episodes([lost], [ADD])
    for part in (str(PATIENCE), "'hermes'", "rollout.agent.tool_call_parser", lost, "template"):
        assert part in warning
    assert episodes([lost] * 3, [ADD]) == [], "once"


def test_one_call_is_enough(caplog):
    def reply(**message):
        said = [{"role": "assistant", "content": "4", **message}]
        response = ModelResponse([1], [2], [-0.5], [0], "stop")
        return InteractionWithTokenLogpReward(response, output_message_list=said, tools=[ADD])

    silent, calling = reply(), reply(tool_calls=[{"function": {"name": "add"}}])
    watch = SilentTools("hermes")
    for episode in [[silent]] * (PATIENCE - 1) + [[calling, silent]] + [[silent]] * (PATIENCE - 1):
        watch.note(episode)
    assert not caplog.messages
    watch.note([silent])
    assert len(caplog.messages) == 1
