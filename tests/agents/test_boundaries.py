"""Texts and numbers that no encoder takes: in requests, in what the model writes, in errors."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from agent_world import Does, ScriptedEngine
from folded_streams import completed
from hypothesis import given
from hypothesis import strategies as st
from sample_agents import QUESTION, ask

from areal.agents.routes import ROUTES
from areal.agents.session import AgentError
from areal.api.json_text import dumps, loads
from areal.openai.parsing.formats import TOOL_FORMATS
from areal.openai.replies import chat_message
from areal.openai.requests import parse_chat

HALF_CALL = r'<tool_call>{"name": "f\ud83d", "arguments": {"x\udc00": "\ud83d!"}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "f"}}
BODIES = {
    "/v1/chat/completions": {"messages": QUESTION, "tools": [TOOL]},
    "/v1/messages": {"messages": QUESTION, "tools": [{"name": "f"}], "max_tokens": 500},
    "/v1/responses": {"input": "2+2=", "tools": [{"type": "function", "name": "f"}]},
}


class Posts:
    """Sends bodies to one route and keeps the answers; worth 1 whatever they say."""

    def __init__(self, path: str, *contents: bytes, first: bool = False) -> None:
        self.path = path
        self.contents = contents
        self.first = first  # an honest call before them
        self.answers: list[httpx.Response] = []

    @property
    def answer(self):
        return self.answers[-1]

    async def run(self, data, **extra):
        root = extra["base_url"].removesuffix("/v1")
        headers = {"Authorization": f"Bearer {extra['api_key']}"}
        post = extra["http_client"].post
        if self.first:
            body = {"messages": QUESTION}
            await post(f"{root}/v1/chat/completions", headers=headers, json=body)
        for content in self.contents:
            self.answers.append(await post(root + self.path, headers=headers, content=content))
        return 1.0


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_half_a_character_in_a_tool_call(world, path, stream):
    agent = Posts(path, json.dumps({**BODIES[path], "stream": stream}).encode())
    (item,) = world.run(agent, engine=ScriptedEngine(world.tokenizer, HALF_CALL)).values()
    assert agent.answer.status_code == 200, agent.answer.text
    (call,) = item.output_message_list[0]["tool_calls"]
    assert call["function"]["name"] == "f\ufffd"
    assert json.loads(call["function"]["arguments"]) == {"x\ufffd": "\ufffd!"}
    assert "f\ufffd" in agent.answer.text and "\\ud83d" not in agent.answer.text


def test_the_chat_goes_on_after_half_a_character(world):
    engine = ScriptedEngine(world.tokenizer, HALF_CALL, "fine")

    async def act(client, extra):
        reply = await ask(client, QUESTION, tools=[TOOL])
        (call,) = reply.choices[0].message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
        await ask(client, [*QUESTION, reply.choices[0].message, result], tools=[TOOL])

    (leaf,) = world.run(Does(act), engine=engine, export_style="concat").values()
    assert len(leaf.path()) == 2


NUMBERS = ["1e999", "-1e999", "NaN", "Infinity", "9" * 400, "9" * 5000]
TEXTS = [r'"\ud83d"', r'"\udfff x"', r'{"\ud83d": 1}', "[" * 500 + "]" * 500]


@pytest.mark.parametrize("path", [*BODIES, "/rl/set_reward", "/rl/end_session"])
def test_a_body_with_what_no_encoder_takes_is_refused(world, path):
    honest = dumps(BODIES.get(path, {"reward": 1.0}))[:-1]
    names = ("metadata", "messages", "input", "temperature", "max_tokens", "reward", "x")
    contents = [  # the last of two keys counts
        f'{honest}, "{name}": {value}}}'.encode() for name in names for value in (*NUMBERS, *TEXTS)
    ]
    agent = Posts(path, *contents, first=True)
    world.run(agent, engine=ScriptedEngine(world.tokenizer, "a"))
    for content, answer in zip(contents, agent.answers, strict=True):
        assert answer.status_code == 400, (content, answer.text)
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error" and error["message"]
        assert ("type" in answer.json()) == (path == "/v1/messages")


def test_the_field_is_named(world):
    content = rb'{"input": "q", "metadata": {"who": "\ud83d"}}'
    agent = Posts("/v1/responses", content, first=True)
    world.run(agent)
    assert agent.answer.json()["error"]["param"] == "metadata.who"


class NoTokens(ScriptedEngine):
    """Its second reply has a token that no tokenizer can decode."""

    async def agenerate(self, request):
        response = await super().agenerate(request)
        if len(self.requests) == 2:
            response.output_tokens[0] = -1
        return response


@pytest.mark.parametrize("path", ROUTES)
def test_an_episode_that_was_answered_500_is_not_data(world, path):
    agent = Posts(path, json.dumps(BODIES[path]).encode(), first=True)
    engine = NoTokens(world.tokenizer, "fine", "broken")
    with pytest.raises(AgentError, match="failed on the server's side"):
        world.run(agent, engine=engine)
    assert agent.answer.status_code == 500
    kind = "api_error" if path == "/v1/messages" else "server_error"
    assert agent.answer.json()["error"]["type"] == kind


def test_another_call_that_succeeds_heals_nothing(world):
    engine = ScriptedEngine(world.tokenizer, RuntimeError("lost"), "fine")

    async def act(client, extra):
        with pytest.raises(openai.InternalServerError):
            await ask(client, QUESTION)
        await ask(client, [{"role": "user", "content": "something else"}])

    with pytest.raises(AgentError, match="lost"):
        world.run(Does(act), engine=engine)


def test_an_sdk_that_tries_again_heals_its_call(world):
    engine = ScriptedEngine(world.tokenizer, RuntimeError("lost"), RuntimeError("again"), "fine")

    async def act(client, extra):
        await ask(client.with_options(max_retries=2), QUESTION)

    assert len(world.run(Does(act), engine=engine)) == 1


def test_a_request_that_ends_with_the_reply_is_one_sample(world):
    engine = ScriptedEngine(world.tokenizer, "one", "two")

    async def act(client, extra):
        reply = await ask(client, QUESTION)
        await ask(client, [*QUESTION, reply.choices[0].message])

    (leaf,) = world.run(Does(act), engine=engine, export_style="concat").values()
    text = world.tokenizer.decode(leaf.model_response.input_tokens)
    assert text.endswith("assistant\none<|im_end|>\n<|im_start|>assistant\n")
    assert len(leaf.path()) == 2


def test_an_episode_whose_template_breaks_its_limits_is_not_data(world, template):
    template("{{ 'x' * (10 ** 10 if messages | length > 1 else 1) }}")
    engine = ScriptedEngine(world.tokenizer, "fine", "unheard")

    async def act(client, extra):
        reply = await ask(client, QUESTION)
        with pytest.raises(openai.InternalServerError, match="takes more than"):
            await ask(client, [*QUESTION, reply.choices[0].message, *QUESTION])

    with pytest.raises(AgentError, match="the chat template of .* takes more than"):
        world.run(Does(act), engine=engine, chat_template_type="hf")


THOUGHT = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("opened_by", ["model", "template"])
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_in_reasoning_is_not_made(world, template, opened_by, path, stream):
    text = f"I could {THOUGHT}</think>Done. {THOUGHT}"
    if opened_by == "model":
        text = f"<think>{text}"
    else:
        template(world.tokenizer.chat_template + "<think>\n")
    agent = Posts(path, json.dumps({**BODIES[path], "stream": stream}).encode())
    (item,) = world.run(agent, engine=ScriptedEngine(world.tokenizer, text)).values()
    assert agent.answer.status_code == 200
    message = item.output_message_list[0]
    assert len(message["tool_calls"]) == 1
    assert message["content"] == "Done." and message["reasoning_content"] == f"I could {THOUGHT}"


# What a model writes.

pieces = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": ',
        "{",
        "}",
        '"a": ',
        "1e999",
        "NaN",
    ]
    + [r'"\ud83d"', '"\ud83d"', "\ude00", "9" * 400, "\0", "<think>", "</think>", '"}', "[" * 300]
)
written = st.lists(pieces | st.text(max_size=5), max_size=12).map("".join)


class Letters:
    """A tokenizer of which every character is a token, also half of one."""

    added_tokens_decoder: dict = {}

    def decode(self, tokens, **options):
        return "".join(map(chr, tokens))


@given(
    written, st.sampled_from(sorted(TOOL_FORMATS)), st.sampled_from(sorted(ROUTES)), st.booleans()
)
def test_any_output_can_be_answered(text, parser, path, stream):
    body = {**BODIES[path], "stream": stream}
    pieces = [[ord(letter)] for letter in text]
    done, _ = completed(path, body, pieces, Letters(), tool_format=parser, stop_ids=[])
    loads(dumps(ROUTES[path].api.reply(done)))
    # An agent hands the reply back: it is understood.
    parse_chat({"messages": [*QUESTION, loads(dumps(chat_message(done.outputs[0].parts)))]})
