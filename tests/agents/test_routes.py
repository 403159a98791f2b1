"""What clients send besides a plain chat: other routes, options, ways to show a key, bad input."""

from __future__ import annotations

import json

import httpx
import pytest
from agent_world import ADD_CALL, ScriptedEngine

USER = {"role": "user", "content": "2+2="}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


class Calls:
    """Sends (path, body) in turn, body None for GET, and keeps the answers; worth 1."""

    def __init__(self, *calls, key="header", root="", headers=None):
        self.calls = calls
        self.key = key
        self.root = root
        self.headers = headers or {}
        self.answers: list[httpx.Response] = []

    async def run(self, data, **extra):
        root, key, headers = extra["base_url"].removesuffix("/v1"), extra["api_key"], self.headers
        if self.key == "header":
            headers = {**headers, "authorization": f"Bearer {key}"}
        elif self.key == "path":
            root = f"{root}/sessions/{key}"
        for path, body in self.calls:
            body = body(self.answers) if callable(body) else body
            url, client = f"{root}{self.root}{path}", extra["http_client"]
            method = "GET" if body is None else "POST"
            self.answers.append(await client.request(method, url, headers=headers, json=body))
        return 1.0

    @property
    def last(self):
        return self.answers[-1].json()


def chat(**options):
    return "/v1/chat/completions", {"messages": [USER], **options}


@pytest.mark.parametrize("key, root", [("header", ""), ("path", ""), ("path", "/v1")])
def test_every_route_with_the_key_in_header_or_path(world, key, root):
    anthropic = {"messages": [USER], "max_tokens": 3}
    agent = Calls(
        ("/v1/chat/completions", {"messages": [USER], "max_tokens": 3}),
        ("/v1/responses", {"input": "2+2=", "max_output_tokens": 3}),
        ("/v1/messages?beta=true", anthropic),
        ("/v1/messages/count_tokens", {"messages": [USER]}),
        ("/v1/completions", {"prompt": "2+2=", "max_tokens": 3}),
        ("/v1/models", None),
        ("/v1/models/claude-of-any-kind", None),
        key=key,
        root=root,
    )
    items = world.run(agent)
    assert [answer.status_code for answer in agent.answers] == [200] * 7, agent.answers
    assert len(items) == 4, "counting and listing are no completions"
    count = agent.answers[3].json()["input_tokens"]
    usage = agent.answers[2].json()["usage"]
    assert count == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert agent.answers[5].json()["data"][0]["id"] == "policy"
    assert agent.last["id"] == "claude-of-any-kind"


def test_a_key_in_the_path_is_checked(world):
    agent = Calls(("/sessions/sk-areal-0-x/v1/chat/completions", {"messages": [USER]}), chat())
    world.run(agent)
    assert [answer.status_code for answer in agent.answers] == [401, 200]


def test_who_looks_whether_somebody_is_there_needs_no_key(world):
    agent = Calls(("/", None), ("/api/hello", None), chat(), key="header")
    world.run(agent)
    assert [answer.status_code for answer in agent.answers] == [200] * 3


def test_token_ids_are_returned(world):
    agent = Calls(chat(return_token_ids=True), chat())
    first, _ = world.run(agent).values()
    reply = agent.answers[0].json()
    assert reply["prompt_token_ids"] == first.model_response.input_tokens
    assert reply["choices"][0]["token_ids"] == first.model_response.output_tokens
    assert "token_ids" not in agent.last["choices"][0]


def test_tokens_in_tokens_out(world):
    ids = world.tokenizer("2+2=")["input_ids"]

    def again(answers):
        tokens = answers[0].json()["choices"][0]["token_ids"]
        return {"token_ids": [*ids, *tokens, *ids], "sampling_params": {"max_tokens": 3}}

    sampling = {"max_tokens": 4, "logprobs": 0, "seed": 3}
    agent = Calls(
        ("/inference/v1/generate", {"token_ids": ids, "sampling_params": sampling}),
        ("/inference/v1/generate", again),
    )
    (leaf,) = world.run(agent, export_style="concat").values()
    first, second = leaf.path()
    (choice,) = agent.answers[0].json()["choices"]
    assert first.model_response.input_tokens == ids
    assert choice["token_ids"] == first.model_response.output_tokens
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == (
        first.model_response.output_logprobs
    )
    assert choice["finish_reason"] == first.model_response.stop_reason
    assert second.parent is first, "tokens that go on make one dialogue"


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_of_a_prompt(world, stream):
    body = {"prompt": "2+2=", "stream": stream, "return_token_ids": True, "logprobs": 0}
    agent = Calls(("/v1/completions", body))
    (item,) = world.run(agent).values()
    assert item.model_response.input_tokens == world.tokenizer("2+2=")["input_ids"]
    assert item.output_message_list[0]["content"] == item.completion["choices"][0]["text"]
    if stream:
        assert agent.answers[0].text.endswith("data: [DONE]\n\n")
    else:
        (choice,) = agent.last["choices"]
        assert choice["token_ids"] == item.model_response.output_tokens
        assert choice["logprobs"]["token_logprobs"] == item.model_response.output_logprobs


def test_only_the_first_call_where_calls_must_not_be_parallel(world):
    tools = [{"name": "add"}]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    agent = Calls(
        chat(tools=[ADD], parallel_tool_calls=False),
        chat(tools=[ADD]),
        ("/v1/messages", {"messages": [USER], "tools": tools, "tool_choice": choice}),
    )
    world.run(agent, engine=ScriptedEngine(world.tokenizer, *[ADD_CALL * 2] * 3))
    first, second = (one.json()["choices"][0] for one in agent.answers[:2])
    assert len(first["message"]["tool_calls"]) == 1 and len(second["message"]["tool_calls"]) == 2
    assert first["finish_reason"] == "tool_calls"
    assert [block["type"] for block in agent.last["content"]] == ["tool_use"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_sequence_is_named(world, stream):
    body = {"messages": [USER], "stop_sequences": ["no", "END"], "stream": stream}
    agent = Calls(("/v1/messages", body))
    world.run(agent, engine=ScriptedEngine(world.tokenizer, "4 END"))
    text = agent.answers[0].text
    assert '"stop_reason":"stop_sequence"' in text and '"stop_sequence":"END"' in text
    assert "END" not in text.replace('"stop_sequence":"END"', "")


def test_a_prefill_is_continued_and_the_chat_goes_on(world):
    begun = [USER, {"role": "assistant", "content": "It is"}]

    def next_turn(answers):
        said = "It is" + answers[0].json()["content"][0]["text"]
        return {"messages": [USER, {"role": "assistant", "content": said}, USER]}

    agent = Calls(("/v1/messages", {"messages": begun}), ("/v1/messages", next_turn))
    engine = ScriptedEngine(world.tokenizer, " four.", "Yes.")
    (leaf,) = world.run(agent, engine=engine, export_style="concat").values()
    first, _ = leaf.path()
    prompt = world.tokenizer.decode(first.model_response.input_tokens)
    assert prompt.endswith("<|im_start|>assistant\nIt is")
    text = world.tokenizer.decode(leaf.model_response.input_tokens)
    assert "assistant\nIt is four.<|im_end|>\n<|im_start|>user" in text


def test_a_reply_that_was_cut_goes_on_with_its_tokens(world):
    def rest(answers):
        said = answers[0].json()["choices"][0]["message"]["content"]
        return {"messages": [USER, {"role": "assistant", "content": said}], "max_tokens": 3}

    agent = Calls(chat(max_tokens=3, seed=1), ("/v1/chat/completions", rest))
    (leaf,) = world.run(agent, export_style="concat").values()
    first, second = (item.model_response for item in leaf.path())
    assert first.stop_reason == "length"
    assert second.input_tokens == [*first.input_tokens, *first.output_tokens]


def test_a_turn_after_a_reply_that_has_ended_is_a_turn(world):
    def again(answers):
        return {"messages": [USER, answers[0].json()["choices"][0]["message"]]}

    agent = Calls(chat(), ("/v1/chat/completions", again))
    engine = ScriptedEngine(world.tokenizer, "4", "5")
    (leaf,) = world.run(agent, engine=engine, export_style="concat").values()
    text = world.tokenizer.decode(leaf.model_response.input_tokens)
    assert text.endswith("assistant\n4<|im_end|>\n<|im_start|>assistant\n")


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
LONG = {"role": "user", "content": "x" * 4000}


@pytest.mark.parametrize(
    "path, body, status, message",
    [
        (*chat(logprobs=True, top_logprobs=2), 400, "only the sampled token's"),
        (*chat(logit_bias={"1": 200}), 400, "logit_bias: expected"),
        (*chat(logit_bias={"999999": 2}), 400, "logit_bias must name tokens of the model"),
        (*chat(presence_penalty=3), 400, "presence_penalty: expected a number"),
        (*chat(messages=[IMAGE]), 400, "reads text only: leave the images out"),
        (*chat(messages=[LONG]), 400, "context_length_exceeded"),
        ("/v1/responses", {"input": "x" * 4000}, 400, "context_length_exceeded"),
        ("/v1/messages", {"messages": [LONG]}, 400, "prompt is too long: "),
        ("/v1/messages/count_tokens", {"messages": []}, 400, "messages: expected a list"),
        ("/v1/completions", {"prompt": ["a", "b"]}, 400, "one completion is one interaction"),
        ("/v1/completions", {"prompt": "a", "n": 2}, 400, "one completion is one interaction"),
        ("/inference/v1/generate", {"token_ids": [10**6]}, 400, "input_ids must lie in"),
        ("/v1/messages/nothing", {}, 404, "not_found_error"),
    ],
)
def test_bad_input_gets_the_providers_error(world, path, body, status, message):
    agent = Calls(chat(), (path, body))
    assert len(world.run(agent)) == 1, "what was refused is not recorded"
    answer = agent.answers[-1]
    assert answer.status_code == status and message in answer.text
    assert ("type" in agent.last) == path.startswith("/v1/messages")
    assert agent.last["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/models"])
def test_a_missing_key_gets_the_providers_error(world, path):
    agent = Calls((path, {"messages": [USER]} if path != "/v1/models" else None), key="none")
    agent.headers = {"anthropic-version": "2023-06-01"} if path == "/v1/models" else {}
    with pytest.raises(ValueError, match="no completion to reward"):
        world.run(agent)
    assert agent.answers[0].status_code == 401
    error = agent.last["error"]
    if path == "/v1/chat/completions":
        assert error["code"] == "invalid_api_key"
    else:
        assert error["type"] == "authentication_error"


_LONG = {"role": "user", "content": "What is two plus two, and what is three plus three? " * 2}


def _turns(stream):
    """Two turns of a dialogue, on each API."""
    said = [_LONG, {"role": "assistant", "content": "?"}, {"role": "user", "content": "And four?"}]
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    return [
        (path, {name: chat, "stream": stream, **options})
        for path, name, options in (
            ("/v1/chat/completions", "messages", {"max_tokens": 3, **usage}),
            ("/v1/responses", "input", {"max_output_tokens": 3}),
            ("/v1/messages", "messages", {"max_tokens": 3}),
        )
        for chat in ([_LONG], said)
    ]


def _usage(answer):
    """(prompt tokens, cached ones) of a reply, whole or streamed."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line[5:] for line in answer.text.splitlines() if line.startswith("data:")]
        events = [json.loads(line) for line in lines if line.strip() != "[DONE]"]
        told = [event.get("usage") or event.get("response", {}).get("usage") for event in events]
        usage = [one for one in told if one][-1]
    else:
        usage = answer.json()["usage"]
    if "cache_read_input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_second_turn_finds_the_first_in_the_cache(world, stream):
    agent = Calls(*_turns(stream))
    items = list(world.run(agent).values())
    for turn, (item, answer) in enumerate(zip(items, agent.answers, strict=True)):
        prompt, cached = _usage(answer)
        assert prompt == item.model_response.input_len
        assert cached == item.model_response.cached_tokens <= prompt
        if turn % 2:
            first = items[turn - 1].model_response.input_len
            assert first - 16 < cached <= prompt, "all pages of the first turn's prompt"


@pytest.mark.parametrize(
    "path, name", [("/v1/chat/completions", "messages"), ("/v1/responses", "input")]
)
def test_penalties_and_biases_reach_the_sampler(world, path, name):
    seven = world.tokenizer("7", add_special_tokens=False)["input_ids"][0]
    options = {"presence_penalty": 0.5, "repetition_penalty": 1.1, "min_p": 0.5}
    agent = Calls((path, {name: [USER], "logit_bias": {str(seven): 100}, **options}))
    (item,) = world.run(agent).values()
    assert item.model_response.output_tokens[0] == seven
    assert item.model_response.output_logprobs[0] == pytest.approx(0.0, abs=1e-6)
