"""Forced tool calls and replies by a schema, in three APIs, by a model that knows neither."""

from __future__ import annotations

import json

import pytest
from folded_streams import FOLDS, events_of

pytest.importorskip("llguidance", reason="constrained output needs the extra `grammar`")

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD = {"name": "add", "description": "adds", "parameters": PARAMETERS}
OTHER = {"name": "other", "parameters": {"type": "object", "additionalProperties": False}}
MESSAGES = [{"role": "user", "content": "2+2="}]
SCHEMA_FORMAT = {"name": "sum", "schema": PARAMETERS, "strict": True}


def chat_tools(*functions):
    return [{"type": "function", "function": one} for one in functions]


def flat_tools(*functions):
    return [{"type": "function", **one} for one in functions]


def anthropic_tools(*functions):
    return [{"name": one["name"], "input_schema": one["parameters"]} for one in functions]


FORCED = {
    "/v1/chat/completions": [
        {"tools": chat_tools(ADD), "tool_choice": "required"},
        {
            "tools": chat_tools(OTHER, ADD),
            "tool_choice": {"type": "function", "function": {"name": "add"}},
        },
    ],
    "/v1/responses": [
        {"tools": flat_tools(ADD), "tool_choice": "required"},
        {"tools": flat_tools(OTHER, ADD), "tool_choice": {"type": "function", "name": "add"}},
    ],
    "/v1/messages": [
        {"tools": anthropic_tools(ADD), "tool_choice": {"type": "any"}},
        {"tools": anthropic_tools(OTHER, ADD), "tool_choice": {"type": "tool", "name": "add"}},
    ],
}


class Asks:
    """Posts one body and keeps the reply, folded if it was streamed."""

    def __init__(self, path: str, body: dict) -> None:
        self.path = path
        self.body = body

    async def run(self, data, **extra):
        prompt = {"input": "2+2="} if self.path == "/v1/responses" else {"messages": MESSAGES}
        self.answer = await extra["http_client"].post(
            extra["base_url"].removesuffix("/v1") + self.path,
            headers={"authorization": f"Bearer {extra['api_key']}"},
            json={**prompt, **self.body},
        )
        return 1.0

    @property
    def reply(self):
        assert self.answer.status_code == 200, self.answer.text
        if not self.body.get("stream"):
            return self.answer.json()
        return FOLDS[self.path](events_of(self.answer.content))


def calls_of(path: str, reply: dict) -> list[tuple[str, dict]]:
    if path == "/v1/chat/completions":
        calls = [one["function"] for one in reply["choices"][0]["message"]["tool_calls"]]
        return [(one["name"], json.loads(one["arguments"])) for one in calls]
    if path == "/v1/responses":
        calls = [one for one in reply["output"] if one["type"] == "function_call"]
        return [(one["name"], json.loads(one["arguments"])) for one in calls]
    calls = [one for one in reply["content"] if one["type"] == "tool_use"]
    return [(one["name"], one["input"]) for one in calls]


def check_arguments(given: dict) -> None:
    assert set(given) == {"a", "b"} and given["b"] == "x"
    assert isinstance(given["a"], int) and 0 <= given["a"] <= 99


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, which", [(path, i) for path in FORCED for i in (0, 1)])
def test_a_forced_call_is_made(world, path, which, stream):
    single = {"disable_parallel_tool_use": True}
    body = {**FORCED[path][which], "stream": stream}
    if path == "/v1/messages":
        body["tool_choice"] = {**body["tool_choice"], **single}
    else:
        body["parallel_tool_calls"] = False
    agent = Asks(path, body)
    (item,) = world.run(agent, max_new_tokens=200).values()
    ((name, arguments),) = calls_of(path, agent.reply)
    assert name == "add"
    check_arguments(arguments)
    assert item.model_response.stop_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path, wanted",
    [
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": SCHEMA_FORMAT}},
        ),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", **SCHEMA_FORMAT}}}),
    ],
)
def test_a_reply_follows_its_schema(world, path, wanted, stream):
    agent = Asks(path, {**wanted, "stream": stream})
    world.run(agent, max_new_tokens=200)
    reply = agent.reply
    if path == "/v1/responses":
        (item,) = reply["output"]
        text = item["content"][0]["text"]
    else:
        text = reply["choices"][0]["message"]["content"]
    check_arguments(json.loads(text))


def test_a_schema_that_no_grammar_can_follow_is_refused(world):
    schema = {"name": "s", "schema": {"type": "object", "properties": {"a": {"$ref": "#/nothing"}}}}
    form = {"type": "json_schema", "json_schema": schema}
    agent = Asks("/v1/chat/completions", {"response_format": form})
    with pytest.raises(ValueError, match="no completion to reward"):
        world.run(agent)
    assert agent.answer.status_code == 400
    assert "grammar" in agent.answer.json()["error"]["message"]
