"""Requests of OpenAI's responses API as chats: what Codex and others send, shortened."""

from __future__ import annotations

import pytest

from areal.api.interaction import InteractionCache
from areal.openai.errors import WireError
from areal.openai.requests import parse_chat
from areal.openai.responses_requests import chat_body

EXEC = {"type": "function", "name": "exec", "strict": False, "parameters": {"type": "object"}}


def call_of(given, **body):
    return parse_chat(chat_body({"model": "m", "input": given, **body}, InteractionCache()))


def message(role, *texts, kind="input_text"):
    parts = [{"type": kind, "text": text} for text in texts]
    return {"type": "message", "id": "msg_1", "role": role, "content": parts}


def test_the_first_request_of_codex():
    call = call_of(
        [
            message("developer", "You are an agent."),
            message("developer", "<skills>", "<permissions>"),
            message("user", "<environment>"),
            message("user", "List the files."),
        ],
        tools=[
            EXEC,
            {"type": "namespace", "name": "agents", "tools": [{**EXEC, "name": "spawn"}]},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
            {"type": "web_search", "external_web_access": False},
        ],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        client_metadata={"a": "b"},
        safety_identifier="s",
        service_tier="auto",
        user="u",
        stream=True,
    )
    roles = [one["role"] for one in call.messages]
    assert roles == ["developer", "developer", "user", "user"]
    assert call.messages[1]["content"] == "<skills>\n<permissions>"
    assert [tool["function"]["name"] for tool in call.tools] == ["exec"]


def test_a_history_of_every_kind_of_call():
    call = call_of(
        [
            message("user", "Go."),
            {"type": "reasoning", "summary": [], "content": [{"text": "Hm."}]},
            message("assistant", "So:", kind="output_text"),
            {"type": "function_call", "call_id": "1", "name": "exec", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "*** Begin"},
            {"type": "local_shell_call", "call_id": "3", "action": {"command": ["ls"]}},
            {
                "type": "function_call_output",
                "call_id": "1",
                "output": [{"type": "input_text", "text": "a"}],
            },
            {"type": "custom_tool_call_output", "call_id": "2", "output": "b"},
            {"type": "local_shell_call_output", "call_id": "3", "output": "c"},
            {"type": "reasoning", "summary": [], "encrypted_content": "x"},
            {"type": "function_call", "call_id": "4", "name": "exec", "arguments": "{}"},
        ],
        tools=[EXEC],
    )
    _, turn, *results, last = call.messages
    assert turn["reasoning_content"] == "Hm." and turn["content"] == "So:"
    said = [(one["function"]["name"], one["function"]["arguments"]) for one in turn["tool_calls"]]
    assert said == [
        ("exec", "{}"),
        ("patch", '{"input":"*** Begin"}'),
        ("local_shell", '{"command":["ls"]}'),
    ]
    assert [one["content"] for one in results] == ["a", "b", "c"]
    assert "reasoning_content" not in last and len(last["tool_calls"]) == 1


@pytest.mark.parametrize(
    "choice, forced, shown",
    [
        ("required", True, 2),
        ({"type": "function", "name": "exec"}, "exec", 2),
        ({"type": "allowed_tools", "mode": "auto", "tools": [EXEC]}, None, 1),
        ({"type": "allowed_tools", "mode": "required", "tools": [EXEC]}, True, 1),
        ("none", None, 0),
    ],
)
def test_the_choice_of_a_tool(choice, forced, shown):
    call = call_of("x", tools=[EXEC, {**EXEC, "name": "other"}], tool_choice=choice)
    assert call.forced_tool == forced and len(call.tools) == shown


@pytest.mark.parametrize(
    "wanted, schema",
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "name": "n", "schema": {"type": "array"}}, {"type": "array"}),
    ],
)
def test_the_format_of_the_text(wanted, schema):
    assert call_of("x", text={"format": wanted, "verbosity": "low"}).json_schema == schema


@pytest.mark.parametrize(
    "item, place",
    [
        ({"type": "item_reference", "id": "x"}, "input[0].type"),
        ({"type": ["x"]}, "input[0].type"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0].image_url"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input[0].content[0].type"),
        ({"type": "local_shell_call", "action": "ls"}, "input[0].action"),
    ],
)
def test_an_unknown_item_is_refused(item, place):
    with pytest.raises(WireError) as caught:
        call_of([item])
    assert caught.value.status == 400 and caught.value.param == place
