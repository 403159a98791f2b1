"""The server agents talk to, spoken to with OpenAI's own client: replies, streams, keys, errors."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest
from agent_world import ADD_CALL as CALL
from agent_world import Does, ScriptedEngine
from sample_agents import QUESTION, ask

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


def test_a_reply_is_what_was_sampled(world):
    seen = {}

    async def act(client, extra):
        reply = await ask(client, QUESTION, logprobs=True, max_completion_tokens=4)
        seen["reply"] = reply

    (item,) = world.run(Does(act)).values()
    reply, response = seen["reply"], item.model_response
    choice = reply.choices[0]
    assert reply.usage.prompt_tokens == response.input_len
    assert reply.usage.completion_tokens == response.output_len <= 4
    assert [t.logprob for t in choice.logprobs.content] == response.output_logprobs
    assert choice.message.role == "assistant"
    assert choice.finish_reason == response.stop_reason
    assert item.completion["id"] == reply.id
    shown = [t for t in response.output_tokens if t != world.tokenizer.eos_token_id]
    assert choice.message.content == world.tokenizer.decode(shown, skip_special_tokens=True)


def test_the_run_decides_what_a_call_leaves_open(world):
    engine = ScriptedEngine(world.tokenizer, "a", "b", "c")

    async def act(client, extra):
        await ask(client, QUESTION)
        await ask(client, QUESTION, max_tokens=3, temperature=0.5, top_p=0.9, seed=11)
        await ask(client, QUESTION, extra_body={"top_k": 4})

    world.run(Does(act), engine=engine, max_new_tokens=6)
    first, second, third = (request.gconfig for request in engine.requests)
    assert (first.max_new_tokens, first.temperature, first.top_p) == (6, 1.0, 1.0)
    assert set(first.stop_token_ids) == {world.tokenizer.eos_token_id, world.tokenizer.pad_token_id}
    assert (second.max_new_tokens, second.temperature, second.top_p) == (3, 0.5, 0.9)
    assert second.seed == 11 and first.seed != third.seed
    assert third.top_k == 4 and third.max_new_tokens == 6


def test_tool_calls_are_parsed_and_continued(world):
    engine = ScriptedEngine(world.tokenizer, f"I add. {CALL}", "4")

    async def act(client, extra):
        reply = await ask(client, QUESTION, tools=[ADD])
        message = reply.choices[0].message
        assert reply.choices[0].finish_reason == "tool_calls" and message.content == "I add."
        (call,) = message.tool_calls
        assert call.function.name == "add" and json.loads(call.function.arguments) == {
            "a": 2,
            "b": 2,
        }
        result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
        reply = await ask(client, [*QUESTION, message, result], tools=[ADD])
        assert reply.choices[0].message.content == "4"

    (leaf,) = world.run(Does(act), engine=engine, export_style="concat").values()
    text = world.tokenizer.decode(leaf.to_tensor_dict()["input_ids"][0])
    assert f"assistant\nI add. {CALL}<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n" in text
    assert text.endswith("<|im_start|>assistant\n4<|im_end|>")


def test_a_stream_tells_the_same(world):
    pieces = {}

    async def act(client, extra):
        stream = await ask(
            client, QUESTION, stream=True, stream_options={"include_usage": True}, seed=3
        )
        pieces["chunks"] = [chunk async for chunk in stream]
        pieces["whole"] = await ask(client, QUESTION, seed=3)

    streamed, whole = world.run(Does(act)).values()
    *chunks, usage = pieces["chunks"]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == pieces["whole"].choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == pieces["whole"].choices[0].finish_reason
    for counted in ("prompt_tokens", "completion_tokens"):
        assert getattr(usage.usage, counted) == getattr(pieces["whole"].usage, counted)
    cached = pieces["whole"].usage.prompt_tokens_details.cached_tokens
    assert cached == whole.model_response.input_len, "the stream had the same prompt"
    assert streamed.model_response.output_tokens == whole.model_response.output_tokens
    assert streamed.completion["id"] == chunks[0].id


def test_a_stream_of_tool_calls(world):
    async def act(client, extra):
        stream = await ask(client, QUESTION, tools=[ADD], stream=True)
        deltas = [chunk.choices[0] async for chunk in stream]
        (call,) = [d.delta.tool_calls[0] for d in deltas if d.delta.tool_calls]
        assert call.index == 0 and call.function.name == "add"
        assert deltas[-1].finish_reason == "tool_calls"

    world.run(Does(act), engine=ScriptedEngine(world.tokenizer, CALL))


def test_concurrent_sessions_never_mix(world):
    async def act(client, extra):
        who = extra["api_key"]
        for turn in range(3):
            await ask(client, [{"role": "user", "content": f"{who} {turn}"}])
            await asyncio.sleep(0.01)

    agent = Does(act)
    with world.open(agent) as workflow:
        running = [world.start(workflow) for _ in range(8)]
        results = [future.result(300) for future in running]
    speakers = [
        {item.messages[0]["content"].split()[0] for item in interactions.values()}
        for interactions in results
    ]
    assert all(len(who) == 1 for who in speakers)
    assert len(set.union(*speakers)) == 8
    assert all(len(interactions) == 3 for interactions in results)


@pytest.mark.parametrize("key", ["", "wrong", "sk-areal-0000-x"])
def test_a_wrong_key_opens_nothing(world, key):
    async def act(client, extra):
        await ask(client, QUESTION)
        other = client.with_options(api_key=key or "none")
        with pytest.raises(openai.AuthenticationError) as caught:
            await ask(other, QUESTION)
        assert caught.value.status_code == 401 and caught.value.code == "invalid_api_key"
        own = extra["api_key"]
        almost = client.with_options(api_key=own[:-1] + ("a" if own[-1] != "a" else "b"))
        with pytest.raises(openai.AuthenticationError):
            await ask(almost, QUESTION)

    assert len(world.run(Does(act))) == 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({"messages": []}, "messages: expected a list that is not empty"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages"),
        ({"n": 0}, "n: expected an integer from 1 to 128"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 7}, "top_p"),
    ],
)
def test_a_bad_request_is_answered_in_openais_shape(world, options, message):
    async def act(client, extra):
        await ask(client, QUESTION)
        body = {"messages": QUESTION, **options}
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, body.pop("messages"), **body)
        assert caught.value.type == "invalid_request_error"
        assert message in caught.value.message

    assert len(world.run(Does(act))) == 1, "what was refused is not recorded"


def test_a_prompt_that_does_not_fit_is_the_callers_fault(world):
    async def act(client, extra):
        await ask(client, QUESTION)
        with pytest.raises(openai.BadRequestError):
            await ask(client, [{"role": "user", "content": "x" * 4000}])

    assert len(world.run(Does(act))) == 1


def test_no_json_and_no_route(world):
    async def act(client, extra):
        await ask(client, QUESTION)
        http, headers = extra["http_client"], {"Authorization": f"Bearer {extra['api_key']}"}
        url = f"{extra['base_url']}/chat/completions"
        for content in (b"{", b"[]", b'"x"'):
            answer = await http.post(url, headers=headers, content=content)
            assert answer.status_code == 400 and "error" in answer.json()
        assert (await http.get(f"{extra['base_url']}/models", headers=headers)).status_code == 200
        assert (await http.get(f"{extra['base_url']}/nothing")).status_code == 404
        root = extra["base_url"].removesuffix("/v1")
        assert (await http.post(f"{root}/rl/start_session", headers=headers)).status_code == 404

    world.run(Does(act))


def test_a_call_that_is_given_up_is_cancelled_and_not_recorded(world):
    class Slow(ScriptedEngine):
        cancelled = False

        async def agenerate(self, request):
            try:
                if len(self.requests) == 0:
                    self.requests.append(request)
                    await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.cancelled = True
                raise
            return await super().agenerate(request)

    engine = Slow(world.tokenizer, "at last")

    async def act(client, extra):
        with pytest.raises(openai.APITimeoutError):
            await ask(client, QUESTION, timeout=httpx.Timeout(0.3))
        await ask(client, QUESTION)

    interactions = world.run(Does(act), engine=engine)
    assert engine.cancelled
    (item,) = interactions.values()
    assert item.output_message_list[0]["content"] == "at last"


def test_a_client_that_leaves_within_its_request_hurts_nobody(world, caplog):
    async def act(client, extra):
        url = httpx.URL(extra["base_url"])
        _, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {extra['api_key']}\r\n"
        writer.write(f"{head}Host: here\r\nContent-Length: 100\r\n\r\n{{".encode())
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        await asyncio.sleep(0.1)
        await ask(client, QUESTION)

    assert len(world.run(Does(act))) == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_session_that_has_ended_takes_no_more(world):
    async def act(client, extra):
        await ask(client, QUESTION)
        http, headers = extra["http_client"], {"Authorization": f"Bearer {extra['api_key']}"}
        root = extra["base_url"].removesuffix("/v1")
        seen.update(headers=headers, root=root)
        bad = await http.post(f"{root}/rl/set_reward", headers=headers, json={"reward": "x"})
        assert bad.status_code == 400 and "finite number" in bad.json()["error"]["message"]
        good = await http.post(f"{root}/rl/set_reward", headers=headers, json={"reward": 2})
        assert good.json() == {"interactions": 1}
        session = next(iter(proxy_of(workflow)._sessions.values()))
        session.close()
        for route, body in (("set_reward", {"reward": 1}), ("end_session", {})):
            answer = await http.post(f"{root}/rl/{route}", headers=headers, json=body)
            assert answer.status_code == 409
        with pytest.raises(openai.ConflictError):
            await ask(client, QUESTION)
        raise KeyError("enough")

    seen = {}
    with world.open(Does(act)) as workflow, pytest.raises(KeyError, match="enough"):
        world.episode(workflow)


def proxy_of(workflow):
    return workflow._proxy._proxy


def test_n_choices_are_interactions_of_one_turn(world):
    seen = {}

    async def act(client, extra):
        first = await ask(client, QUESTION)
        said = {"role": "assistant", "content": first.choices[0].message.content}
        chat = [*QUESTION, said, {"role": "user", "content": "Again!"}]
        seen["whole"] = whole = await ask(client, chat, n=3, seed=5)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await ask(client, chat, n=3, seed=5, **options)
        seen["chunks"] = [chunk async for chunk in stream]
        return {whole.id: 1.0, f"{whole.id}-2": 3.0, 2: 0.5}

    items = world.run(Does(act), export_style="individual", turn_discount=0.0)
    whole, (*chunks, usage) = seen["whole"], seen["chunks"]
    ids = [*(f"{whole.id}{end}" for end in ("", "-1", "-2"))]
    ids += [f"{chunks[0].id}{end}" for end in ("", "-1", "-2")]
    first, *others = items
    assert others == ids
    assert [items[name].reward for name in ids] == [1.0, 0.0, 3.0, 0.5, 0.5, 0.5]
    assert {id(items[name].parent) for name in ids} == {id(items[first])}
    for index, choice in enumerate(whole.choices):
        item, streamed = items[ids[index]], items[ids[3 + index]]
        assert choice.index == index
        assert item.output_message_list[0]["content"] == choice.message.content
        assert item.completion["id"] == ids[index] and len(item.completion["choices"]) == 1
        assert item.model_response.output_tokens == streamed.model_response.output_tokens
        told = [one.choices[0] for one in chunks if one.choices[0].index == index]
        assert "".join(one.delta.content or "" for one in told) == choice.message.content
        assert told[-1].finish_reason == choice.finish_reason
    assert len({tuple(items[name].model_response.output_tokens) for name in ids[:3]}) > 1
    sampled = sum(items[name].model_response.output_len for name in ids[:3])
    assert whole.usage.completion_tokens == usage.usage.completion_tokens == sampled
    assert whole.usage.prompt_tokens == items[ids[0]].model_response.input_len


def test_a_number_rewards_all_choices_of_the_newest_turn(world):
    async def act(client, extra):
        await ask(client, QUESTION, n=2)
        return 2.0

    assert [item.reward for item in world.run(Does(act)).values()] == [2.0, 2.0]


def test_choices_are_recorded_together_or_not_at_all(world):
    engine = ScriptedEngine(world.tokenizer, "4", ValueError("no"), "5", "6")

    async def act(client, extra):
        with pytest.raises(openai.BadRequestError):
            await ask(client, QUESTION, n=2)
        reply = await ask(client, QUESTION, n=2)
        assert [choice.message.content for choice in reply.choices] == ["5", "6"]

    assert len(world.run(Does(act), engine=engine)) == 2


def test_a_retry_of_n_choices_gets_them_again(world):
    async def act(client, extra):
        asked = {"extra_headers": {"Idempotency-Key": "k"}, "n": 2}
        first, again = await ask(client, QUESTION, **asked), await ask(client, QUESTION, **asked)
        assert first == again

    assert len(world.run(Does(act))) == 2
