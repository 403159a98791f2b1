"""Anthropic's messages route: the same model and the same session, in other words."""

from __future__ import annotations

from itertools import groupby

import pytest
from agent_world import ADD_CALL as CALL
from agent_world import ScriptedEngine
from folded_streams import events_of, folded_message

TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "2+2="}


class Speaks:
    """Posts `bodies` to /v1/messages with Anthropic's header and keeps the answers."""

    def __init__(self, *bodies):
        self.bodies = bodies
        self.answers = []

    async def run(self, data, **extra):
        url, headers = f"{extra['base_url']}/messages", {"x-api-key": extra["api_key"]}
        for body in self.bodies:
            body = body(self.answers) if callable(body) else body
            body = {"model": "policy", "max_tokens": 5, **body}
            self.answers.append(await extra["http_client"].post(url, headers=headers, json=body))
        return 1.0


def test_a_message(world):
    agent = Speaks({"messages": [USER], "system": [{"type": "text", "text": "Be brief."}]})
    (item,) = world.run(agent).values()
    answer = agent.answers[0].json()
    response = item.model_response
    assert answer["type"] == "message" and answer["role"] == "assistant"
    assert answer["usage"] == {
        "input_tokens": response.input_len - response.cached_tokens,
        "output_tokens": response.output_len,
        "cache_read_input_tokens": response.cached_tokens,
        "cache_creation_input_tokens": 0,
    }
    assert answer["content"][0]["type"] == "text"
    assert (
        answer["stop_reason"] == {"stop": "end_turn", "length": "max_tokens"}[response.stop_reason]
    )
    prompt = world.tokenizer.decode(response.input_tokens)
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2=")


def test_tools_over_two_turns_make_one_chat(world):
    def second(answers):
        reply = answers[0].json()
        (use,) = [block for block in reply["content"] if block["type"] == "tool_use"]
        assert use["name"] == "add" and use["input"] == {"a": 2, "b": 2}
        assert reply["stop_reason"] == "tool_use"
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "4"}
        turns = [USER, {"role": "assistant", "content": reply["content"]}]
        return {"messages": [*turns, {"role": "user", "content": [result]}], "tools": [TOOL]}

    agent = Speaks({"messages": [USER], "tools": [TOOL]}, second)
    engine = ScriptedEngine(world.tokenizer, f"So: {CALL}", "4")
    (leaf,) = world.run(agent, engine=engine, export_style="concat").values()
    assert len(leaf.path()) == 2
    assert agent.answers[1].json()["content"] == [{"type": "text", "text": "4"}]
    text = world.tokenizer.decode(leaf.model_response.input_tokens)
    assert text.endswith("<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n")


def test_a_stream_of_events(world):
    agent = Speaks({"messages": [USER], "tools": [TOOL], "stream": True})
    engine = ScriptedEngine(world.tokenizer, f"So: {CALL}")
    world.run(agent, engine=engine)
    events = events_of(agent.answers[0].text)
    kinds = [kind for kind, _ in groupby(event["type"] for event in events)]
    assert kinds == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_stop"] * 2,
        "message_delta",
        "message_stop",
    ]
    assert events[2]["delta"] == {"type": "text_delta", "text": "S"}
    text, use = folded_message(events)["content"]
    assert text == {"type": "text", "text": "So:"} and use["input"] == {"a": 2, "b": 2}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "said, reason, sequence",
    [("So END", "stop_sequence", "END"), ("So.", "end_turn", None), (CALL, "tool_use", None)],
)
def test_why_a_message_ends(world, stream, said, reason, sequence):
    body = {"messages": [USER], "tools": [TOOL], "stop_sequences": ["x", "END"], "stream": stream}
    agent = Speaks(body)
    world.run(agent, engine=ScriptedEngine(world.tokenizer, said))
    answer = agent.answers[0]
    message = folded_message(events_of(answer.text)) if stream else answer.json()
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(
    "body, message",
    [
        ({}, "messages: expected a list"),
        ({"messages": ["x"]}, r"messages[0]: expected a JSON object"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content[0].source"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens"),
    ],
)
def test_errors_have_anthropics_shape(world, body, message):
    agent = Speaks({"messages": [USER]}, body)
    world.run(agent)
    answer = agent.answers[1]
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert answer.json()["type"] == "error" and error["type"] == "invalid_request_error"
    assert message in error["message"]
