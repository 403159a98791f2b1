"""OpenAI's responses route, spoken to with its own client."""

from __future__ import annotations

import json

import openai
import pytest
from agent_world import ADD_CALL, Does, ScriptedEngine

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}


async def ask(client, given, **options):
    return await client.responses.create(model="policy", input=given, **options)


def test_a_response_is_what_was_sampled(world):
    async def act(client, extra):
        seen.append(await ask(client, "2+2=", instructions="Be brief.", max_output_tokens=4))
        return {seen[0].id: 0.5}

    seen = []
    (item,) = world.run(Does(act)).values()
    (reply,), response = seen, item.model_response
    assert item.reward == 0.5 and reply.id.startswith("resp_")
    assert reply.usage.input_tokens == response.input_len
    assert reply.usage.output_tokens == response.output_len <= 4
    assert reply.status == {"stop": "completed", "length": "incomplete"}[response.stop_reason]
    assert reply.output_text == item.output_message_list[0]["content"]
    prompt = world.tokenizer.decode(response.input_tokens)
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2=")
    assert item.response["id"] == reply.id and item.input_data == "2+2="


@pytest.mark.parametrize("by_id", [False, True], ids=["items", "previous_response_id"])
def test_tools_over_two_turns_make_one_chat(world, by_id):
    async def act(client, extra):
        first = await ask(client, "2+2=", tools=[ADD], instructions="Add.")
        (call,) = [item for item in first.output if item.type == "function_call"]
        assert call.name == "add" and json.loads(call.arguments) == {"a": 2, "b": 2}
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
        options = {"tools": [ADD], "instructions": "Add."}
        if by_id:
            second = await ask(client, [result], previous_response_id=first.id, **options)
        else:
            echo = [item.model_dump() for item in first.output]
            question = {"role": "user", "content": [{"type": "input_text", "text": "2+2="}]}
            second = await ask(client, [question, *echo, result], **options)
        assert second.output_text == "4"

    engine = ScriptedEngine(world.tokenizer, f"So: {ADD_CALL}", "4")
    (leaf,) = world.run(Does(act), engine=engine, export_style="concat").values()
    assert len(leaf.path()) == 2
    text = world.tokenizer.decode(leaf.model_response.input_tokens)
    assert text.endswith("<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n")


def test_a_stream_of_events(world):
    async def act(client, extra):
        stream = await ask(client, "2+2=", tools=[ADD], stream=True)
        events.extend([event async for event in stream])

    events = []
    world.run(Does(act), engine=ScriptedEngine(world.tokenizer, f"So: {ADD_CALL}"))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    text = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert text == ["S", "o", ":"]
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert json.loads(done[0].arguments) == {"a": 2, "b": 2}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == "So:"


@pytest.mark.parametrize(
    "given, options, message",
    [
        (["x"], {}, "input[0]: expected a JSON object"),
        ([{"type": "web_search_call"}], {}, "'web_search_call' is not understood"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], {}, "input[0].content"),
        ("x", {"tools": [{"type": "function"}]}, "tools[0].name"),
        ("x", {"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ("x", {"conversation": "conv_0"}, "conversation: not supported"),
        ("x", {"include": ["message.output_text.logprobs"]}, "include"),
        ("x", {"previous_response_id": "resp_0"}, "no 'resp_0' in this session"),
    ],
)
def test_what_cannot_be_done_is_refused(world, given, options, message):
    async def act(client, extra):
        await ask(client, "2+2=")
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, given, **options)
        assert message in caught.value.message

    assert len(world.run(Does(act))) == 1
