"""Anthropic's requests as chats: what Claude Code and others send, shortened."""

from __future__ import annotations

import logging

import pytest

from areal.api.interaction import InteractionCache
from areal.openai import requests
from areal.openai.anthropic_replies import error_of
from areal.openai.anthropic_requests import chat_body, prompt_body
from areal.openai.errors import WireError, refusal
from areal.openai.requests import parse_chat

USER = {"role": "user", "content": "List the files."}
BASH = {"name": "Bash", "description": "Runs.", "input_schema": {"type": "object"}}
EPHEMERAL = {"type": "ephemeral"}


def call_of(**body):
    return parse_chat(chat_body({"model": "m", "max_tokens": 9, **body}, InteractionCache()))


def test_the_first_request_of_claude_code():
    call = call_of(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: version=1.2; hash=abc"},
            {"type": "text", "text": "You are an agent.", "cache_control": EPHEMERAL},
        ],
        messages=[
            {
                "role": "user",
                "content": [{"type": "text", "text": "Remember."}, {"type": "text", "text": "Go."}],
            },
            {
                "role": "system",
                "content": [{"type": "text", "text": "# Place", "cache_control": EPHEMERAL}],
            },
        ],
        tools=[BASH, {**BASH, "name": "Later", "defer_loading": True}],
        metadata={"user_id": "u"},
        thinking={"type": "adaptive", "display": "updates"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        betas=["a"],
        service_tier="auto",
        stream=True,
    )
    assert call.messages == [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "Remember.\nGo."},
        {"role": "system", "content": "# Place"},
    ]
    assert [tool["function"]["name"] for tool in call.tools] == ["Bash"]
    assert call.stream and call.json_schema is None and call.forced_tool is None


def test_a_turn_with_thoughts_and_tools():
    call = call_of(
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "So:"},
                    {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "is_error": True,
                        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                        "cache_control": EPHEMERAL,
                    },
                    {"type": "text", "text": "Go on."},
                ],
            },
        ],
        tools=[BASH],
    )
    called = {"name": "Bash", "arguments": '{"command":"ls"}'}
    _, turn, result, user = call.messages
    assert turn["reasoning_content"] == "Hm." and turn["content"] == "So:"
    assert turn["tool_calls"] == [{"id": "t1", "type": "function", "function": called}]
    assert result == {"role": "tool", "tool_call_id": "t1", "content": "a\nb"}
    assert user == {"role": "user", "content": "Go on."}


def test_a_deferred_tool_is_shown_where_it_was_found():
    found = {"type": "tool_reference", "tool_name": "Later"}
    messages = [
        USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Find"}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": [found]}],
        },
    ]
    later = {**BASH, "name": "Later", "defer_loading": True}
    call = call_of(messages=messages, tools=[{**BASH, "name": "Find"}, later])
    assert '"name":"Later"' in call.messages[-1]["content"]
    assert len(call.tools) == 1, "the prompt before it is as it was"


def test_tools_that_only_a_provider_runs_are_left_out(caplog):
    requests._logged_kinds.clear()
    kinds = ["web_search_20250305", "bash_20250124", "computer_20250124", "mcp_toolset"]
    tools = [{"type": kind, "name": "x"} for kind in kinds] + [{**BASH, "type": "custom"}]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert len(call_of(messages=[USER], tools=tools).tools) == 1
    lines = [record.message for record in caplog.records if "left out" in record.message]
    assert len(lines) == len(kinds) and "'mcp_toolset'" in "".join(lines)


@pytest.mark.parametrize(
    "choice, forced, parallel",
    [
        ({"type": "auto"}, None, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, None, False),
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "Bash"}, "Bash", True),
    ],
)
def test_the_choice_of_a_tool(choice, forced, parallel):
    call = call_of(messages=[USER], tools=[BASH], tool_choice=choice)
    assert (call.forced_tool, call.parallel_tool_calls) == (forced, parallel)


def test_a_schema_of_the_output():
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    wanted = {"type": "json_schema", "schema": schema}
    for options in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        assert call_of(messages=[USER], **options).json_schema == schema


def test_a_final_message_of_the_assistant_is_a_prefill():
    begun = {"role": "assistant", "content": "{"}
    assert call_of(messages=[USER, begun]).continues_final
    assert not call_of(messages=[USER]).continues_final


@pytest.mark.parametrize(
    "block, place",
    [
        ({"type": "image", "source": {}}, "messages[0].content[0].source.type"),
        ({"type": "tool_use", "name": "f"}, "messages[0].content[0].type"),
        ({"type": "thinking", "thinking": "x"}, "messages[0].content[0].type"),
        (
            {"type": "document", "source": {"type": "base64", "data": ""}},
            "messages[0].content[0].source.type",
        ),
    ],
)
def test_a_block_that_is_not_understood_is_refused(block, place):
    with pytest.raises(WireError) as caught:
        call_of(messages=[{"role": "user", "content": [block]}])
    assert caught.value.status == 400 and caught.value.param == place


def test_counting_needs_no_bound():
    assert prompt_body({"messages": [USER], "tools": [BASH]})["tools"][0]["type"] == "function"


def test_a_long_prompt_is_named_as_clients_know_it():
    error = error_of(refusal("input_ids: 9 tokens leave no room for output"))["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: ")
    assert error_of(WireError(413, "big"))["error"]["type"] == "request_too_large"
