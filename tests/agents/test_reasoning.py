"""Reasoning apart from content, on all routes, and what becomes of it in the next turn."""

from __future__ import annotations

import pytest
from agent_world import ADD_CALL, Does, ScriptedEngine
from folded_streams import events_of, folded_message

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
QUESTION = {"role": "user", "content": "2+2="}
OUTPUT = f"<think>\nI could {ADD_CALL}\n</think>\n\nI add. {ADD_CALL}"
REASONING = f"I could {ADD_CALL}"


async def chat(client, stream):
    """(reasoning, content, number of calls), then a second turn."""
    options = {"model": "policy", "tools": [ADD]}
    first = await client.chat.completions.create(messages=[QUESTION], stream=stream, **options)
    if stream:
        deltas = [chunk.choices[0].delta async for chunk in first]
        thoughts = [getattr(delta, "reasoning_content", "") for delta in deltas]
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        said = "".join(thoughts), "".join(delta.content or "" for delta in deltas), len(calls)
    else:
        message = first.choices[0].message
        calls = message.tool_calls
        said = message.reasoning_content, message.content, len(calls)
    echo = {"role": "assistant", "content": said[1], "tool_calls": [c.model_dump() for c in calls]}
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": "4"}
    await client.chat.completions.create(messages=[QUESTION, echo, result], **options)
    return said


async def responses(client, stream):
    tool = {"type": "function", **ADD["function"], "strict": True}
    options = {"model": "policy", "tools": [tool]}
    first = await client.responses.create(input=[QUESTION], stream=stream, **options)
    if stream:
        events = [event async for event in first]
        thoughts = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
        first = events[-1].response
        assert len(thoughts) > 9 and "".join(thoughts) == first.output[0].content[0].text
    reasoning, message, call = first.output
    echo = [item.model_dump(exclude_none=True) for item in first.output]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    await client.responses.create(input=[QUESTION, *echo, result], **options)
    assert reasoning.type == "reasoning" and reasoning.summary == []
    return reasoning.content[0].text, first.output_text, 1


async def messages(client, stream):
    tool = {"name": "add", "input_schema": {"type": "object"}}
    body = {"model": "policy", "max_tokens": 500, "tools": [tool], "stream": stream}
    headers = {"x-api-key": client.api_key}

    async def post(turns):
        url = f"{client.base_url}messages"
        return await client._client.post(url, headers=headers, json={**body, "messages": turns})

    answer = await post([QUESTION])
    message = folded_message(events_of(answer.text)) if stream else answer.json()
    blocks = message["content"]
    thinking, text, use = blocks
    assert thinking["signature"] == ""
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "4"}
    echo = {"role": "assistant", "content": blocks}
    await post([QUESTION, echo, {"role": "user", "content": [result]}])
    return thinking["thinking"], text["text"], 1


@pytest.mark.parametrize("speak", [chat, responses, messages])
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_and_the_turn_after_it(world, speak, stream):
    async def act(client, extra):
        said.append(await speak(client, stream))

    said = []
    engine = ScriptedEngine(world.tokenizer, OUTPUT, "4")
    (leaf,) = world.run(Does(act), engine=engine, export_style="concat").values()
    assert said == [(REASONING, "I add.", 1)]
    # The client sends no reasoning back, and the tokens go on exactly as sampled.
    first = leaf.path()[0].model_response
    assert len(leaf.path()) == 2
    before = [*first.input_tokens, *first.output_tokens]
    assert leaf.model_response.input_tokens[: len(before)] == before


@pytest.mark.parametrize("keeps", [True, False])
def test_a_template_may_show_earlier_reasoning(world, template, keeps):
    if keeps:
        shown = (
            "{{ '<think>' + message.reasoning_content + '</think>' if message.reasoning_content }}"
        )
        template(
            world.tokenizer.chat_template.replace(
                "{{ message.content", shown + "{{ message.content"
            )
        )

    async def act(client, extra):
        await chat(client, False)

    engine = ScriptedEngine(world.tokenizer, OUTPUT, "4")
    _, second = world.run(Does(act), engine=engine, chat_template_type="hf").values()
    prompt = world.tokenizer.decode(second.model_response.input_tokens)
    assert (f"<think>{REASONING}</think>I add." in prompt) == keeps
    assert second.parent is not None


def test_reasoning_can_stay_in_the_content(world):
    async def act(client, extra):
        reply = await client.chat.completions.create(
            model="policy", messages=[QUESTION], tools=[ADD]
        )
        message = reply.choices[0].message
        assert len(message.tool_calls) == 1 and not hasattr(message, "reasoning_content")
        assert message.content == OUTPUT.removesuffix(ADD_CALL).rstrip()

    engine = ScriptedEngine(world.tokenizer, OUTPUT)
    world.run(Does(act), engine=engine, reasoning_parser="none")


def test_the_format_of_calls_can_be_named(world):
    text = '[TOOL_CALLS]add[ARGS]{"a": 2}'

    async def act(client, extra):
        reply = await client.chat.completions.create(
            model="policy", messages=[QUESTION], tools=[ADD]
        )
        (call,) = reply.choices[0].message.tool_calls
        assert call.function.arguments == '{"a": 2}' and len(call.id) == 9

    world.run(Does(act), engine=ScriptedEngine(world.tokenizer, text), tool_call_parser="mistral")
