"""Streams of the three APIs: they say what the whole reply says, while it is being sampled."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest
from agent_world import ADD_CALL, Does, ScriptedEngine
from folded_streams import FOLDS, completed, events_of
from hypothesis import given
from hypothesis import strategies as st
from sample_agents import QUESTION, ask
from sglang_server import sglang_python
from tiny_tokenizer import EOS, byte_tokenizer
from written_output import MARKED

from areal.agents.proxy import AgentProxy
from areal.agents.routes import ROUTES
from areal.agents.session import AgentError, Session, SessionOptions
from areal.api.config.inference import AgentConfig, GenerationHyperparameters
from areal.engine.remote.engine import RemoteEngine
from areal.engine.remote.native import NativeRemoteEngine, launch_native_server
from areal.engine.remote.sglang import SGLangProtocol, launch_sglang_server
from areal.openai.parsing.formats import TOOL_FORMATS
from areal.openai.parsing.parser import fold

pytestmark = pytest.mark.usefixtures("forked_children")

TOKENIZER = byte_tokenizer()
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
BODIES = {
    "/v1/chat/completions": {
        "messages": QUESTION,
        "tools": [{"type": "function", "function": FUNCTION}],
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/messages": {
        "messages": QUESTION,
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
        "stream": True,
    },
    "/v1/responses": {
        "input": "2+2=",
        "tools": [{"type": "function", **FUNCTION}],
        "stream": True,
    },
}
paths = pytest.mark.parametrize("path", ROUTES)

# Property: whatever the model writes, and however its tokens arrive.

texts = st.lists(
    st.sampled_from([write("add", {"a": 1, "text": "ü"}) for write in MARKED.values()])
    | st.sampled_from(["<think>", "</think>", "[THINK]", "[/THINK]", "STOP", "ü", " ", "\n\n", "a"])
    | st.sampled_from(["<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", "final"]),
    max_size=8,
).map("".join)


@given(
    path=st.sampled_from(sorted(ROUTES)),
    ids=texts.map(TOKENIZER.encode) | st.lists(st.integers(2, 320), max_size=20),
    sizes=st.lists(st.integers(0, 9), max_size=30),
    tool_format=st.sampled_from(sorted(TOOL_FORMATS)),
    reason=st.sampled_from(["stop", "length"]),
    logprobs=st.booleans(),
    in_reasoning=st.booleans(),
    has_tools=st.booleans(),
)
def test_the_folded_stream_is_the_whole_reply(
    path, ids, sizes, tool_format, reason, logprobs, in_reasoning, has_tools
):
    body = {**BODIES[path], "logprobs": logprobs, "stop": ["STOP"]}
    if path == "/v1/messages":
        body["stop_sequences"] = body.pop("stop")
    if not has_tools:
        del body["tools"]
    ids = [*ids, EOS] if reason == "stop" else ids
    pieces, rest = [], ids
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    options = {"tool_format": tool_format, "in_reasoning": in_reasoning, "stop_ids": [EOS]}
    done, events = completed(path, body, [*pieces, rest], TOKENIZER, stop_reason=reason, **options)
    whole = json.loads(json.dumps(ROUTES[path].api.reply(done)))
    assert FOLDS[path](events) == whole
    at_once, _ = completed(path, body, [ids], TOKENIZER, stop_reason=reason, **options)
    (one,), (other,) = at_once.outputs, done.outputs
    assert [type(part) for part in one.parts] == [type(part) for part in other.parts]
    assert fold(one.parts).content == fold(other.parts).content
    assert one.stop_string == other.stop_string


# The real server.


async def post(extra, path, **changes):
    """The text of the answer to a body of this path."""
    answer = await extra["http_client"].post(
        url_of(extra, path), headers=key_of(extra), json={**BODIES[path], **changes}
    )
    assert answer.status_code == 200, answer.text
    return answer.text


def opened(extra, path, **changes):
    """An open stream, to be read with `aiter_lines`."""
    return extra["http_client"].stream(
        "POST", url_of(extra, path), headers=key_of(extra), json={**BODIES[path], **changes}
    )


def url_of(extra, path):
    return extra["base_url"].removesuffix("/v1") + path


def key_of(extra):
    return {"Authorization": f"Bearer {extra['api_key']}"}


async def until(lines, sign):
    """Reads lines until one contains `sign`; returns all of them."""
    read = []
    async for line in lines:
        read.append(line)
        if sign in line:
            return read
    raise AssertionError(f"no {sign} in {read}")


FIRST_TEXT = {
    "/v1/chat/completions": '"content":"w',
    "/v1/messages": '"text_delta"',
    "/v1/responses": "response.output_text.delta",
}


def without_ids(reply):
    """Ids, and when it was made, are its own."""
    text = json.dumps({**reply, "created": 0, "created_at": 0})
    return json.loads(text.replace(reply["id"], "ID"))


OUTPUT = f"<think>\nhm {ADD_CALL}\n</think>\n\nI add.\n{ADD_CALL} Done."


@paths
def test_a_stream_is_recorded_as_the_whole_reply_is(world, path):
    async def act(client, extra):
        texts.append(await post(extra, path))
        texts.append(await post(extra, path, stream=False, stream_options=None))

    texts = []
    engine = ScriptedEngine(world.tokenizer, OUTPUT, OUTPUT)
    streamed, whole = world.run(Does(act), engine=engine).values()
    folded = FOLDS[path](events_of(texts[0]))
    assert folded == (streamed.response or streamed.completion)
    kinds = [event.get("type") for event in events_of(texts[0])]
    assert len(kinds) > 40, "token by token"
    expected = whole.response or whole.completion
    for one in (folded, expected):
        for call in calls_in(one):
            call.pop("id", None), call.pop("call_id", None)
    assert without_ids(folded) == without_ids(expected)
    assert streamed.model_response.output_tokens == whole.model_response.output_tokens


def calls_in(reply):
    if "choices" in reply:
        return reply["choices"][0]["message"]["tool_calls"]
    items = reply.get("output") or reply["content"]
    return [item for item in items if item["type"] in ("tool_use", "function_call")]


class Gated(ScriptedEngine):
    """Tells the first `count` tokens, then waits for `gate`, or raises `error` if that is set."""

    def __init__(self, tokenizer, *texts, count=3, error=None):
        super().__init__(tokenizer, *texts)
        self.count = count
        self.error = error
        self.gate = asyncio.Event()
        self.num_told = 0
        self.is_cancelled = asyncio.Event()

    async def tell(self, request, tokens):
        for token in tokens:
            if self.num_told == self.count:
                await self._wait()
            if request.on_tokens is not None:
                request.on_tokens([token], [-0.125])
            self.num_told += 1

    async def _wait(self):
        if self.error is not None:
            raise self.error
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.is_cancelled.set()
            raise


@paths
def test_the_first_chunk_leaves_before_the_fourth_token(world, path):
    engine = Gated(world.tokenizer, "well, then")

    async def act(client, extra):
        async with opened(extra, path) as answer:
            lines = answer.aiter_lines()
            await until(lines, FIRST_TEXT[path])
            assert engine.num_told == 3
            engine.gate.set()
            rest = [line async for line in lines]
        assert engine.num_told == 11 and rest

    (item,) = world.run(Does(act), engine=engine).values()
    assert item.output_message_list[0]["content"] == "well, then"


@pytest.fixture(scope="module")
def engines(world, tmp_path_factory):
    """Real ones by name, each with the world's model."""
    token = "token-of-the-streams"
    native, address = launch_native_server(world.folder, token=token, num_pages=400)
    python = sglang_python(tmp_path_factory.mktemp("env"))
    stock, other = launch_sglang_server(
        world.folder, python=python, token=token, dtype="float32", setup_timeout_s=900
    )
    found = {
        "in this process": world.engine,
        "a native server": NativeRemoteEngine([address], token, request_timeout_s=60),
        "a stock server": RemoteEngine(
            SGLangProtocol(world.folder), [other], token, request_timeout_s=60
        ),
    }
    yield found
    found["a native server"].destroy()
    found["a stock server"].destroy()
    native.terminate()
    stock.terminate()


async def num_running(engine):
    return (await asyncio.to_thread(engine.stats))["running"]


@pytest.mark.parametrize("kind", ["in this process", "a native server", "a stock server"])
def test_streams_run_with_the_generation_and_end_with_their_client(world, engines, kind):
    """Also through the engines that a run has: and who leaves frees it, and is not recorded."""
    engine, seen = engines[kind], {path: [] for path in ROUTES}

    async def leave_early(extra, path):
        async with opened(extra, path) as answer:
            await until(answer.aiter_lines(), "data: ")
            seen[path].append(await num_running(engine))
        async with asyncio.timeout(30):
            while await num_running(engine):
                await asyncio.sleep(0.01)

    async def act(client, extra):
        for path in ROUTES:
            for _ in range(8):  # it may have ended before we looked
                if 1 not in seen[path]:
                    await leave_early(extra, path)
        await ask(client, QUESTION, max_tokens=3)

    (item,) = world.run(Does(act), engine=engine, max_new_tokens=1800, ignore_eos=True).values()
    assert all(1 in running for running in seen.values()), seen
    assert item.model_response.output_len == 3


@paths
def test_who_leaves_in_the_middle_frees_the_engine_and_is_not_recorded(world, path):
    engine = Gated(world.tokenizer, "well, then", "and now")

    async def act(client, extra):
        async with opened(extra, path) as answer:
            await until(answer.aiter_lines(), FIRST_TEXT[path])
        async with asyncio.timeout(20):
            await engine.is_cancelled.wait()
        engine.gate.set()
        await ask(client, QUESTION)

    (item,) = world.run(Does(act), engine=engine).values()
    assert item.output_message_list[0]["content"] == "and now"


KEEP_ALIVES = {
    "/v1/chat/completions": ": keep-alive",
    "/v1/messages": "event: ping",
    "/v1/responses": ": keep-alive",
}


@paths
@pytest.mark.parametrize("count", [0, 3], ids=["at the first token", "within"])
def test_a_long_wait_is_not_silent(world, path, count):
    options = SessionOptions(AgentConfig(), world.tokenizer, GenerationHyperparameters())
    engine = Gated(world.tokenizer, "well, then", count=count)

    async def act():
        proxy = AgentProxy(AgentConfig(), silence_s=0.02)
        await proxy.start()
        session = Session(options, engine)
        proxy.admit(session)
        extra = {"base_url": proxy.base_url, "api_key": session.key}
        async with (
            httpx.AsyncClient(timeout=300) as client,
            opened({**extra, "http_client": client}, path) as answer,
        ):
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            read = await until(lines, KEEP_ALIVES[path])
            read += await until(lines, KEEP_ALIVES[path])
            engine.gate.set()
            read += [line async for line in lines]
        await proxy.stop()
        return session, "\n".join(read)

    session, text = world.runner.run(act()).result(300)
    (item,) = session.cache.values()
    events = [event for event in events_of(text) if event.get("type") != "ping"]
    assert FOLDS[path](events) == (item.response or item.completion)


@paths
def test_a_failure_in_the_middle_is_an_event_and_fails_the_episode(world, path):
    engine = Gated(world.tokenizer, "fine", "well, then", error=RuntimeError("lost the GPU"))
    engine.count = 5 + 3  # with the end token of the first

    async def act(client, extra):
        await ask(client, QUESTION)
        events.extend(events_of(await post(extra, path)))

    events = []
    with pytest.raises(AgentError, match="failed on the server's side: RuntimeError: lost the GPU"):
        world.run(Does(act), engine=engine)
    if path == "/v1/chat/completions":
        assert "lost the GPU" in events[-1]["error"]["message"]
        assert events[-1]["error"]["type"] == "server_error"
    elif path == "/v1/messages":
        assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
    else:
        error, failed = events[-2:]
        assert error["type"] == "error" and "lost the GPU" in error["message"]
        assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_openais_client_raises_it(world):
    async def act(client, extra):
        await ask(client, QUESTION)
        for call in (
            ask(client, QUESTION, stream=True),
            client.responses.create(model="policy", input="2+2=", stream=True),
        ):
            engine.num_told, engine.count = 0, 3
            with pytest.raises(openai.APIError, match="lost the GPU"):
                async for _ in await call:
                    pass

    engine = Gated(
        world.tokenizer, "fine", "well", "then", count=9, error=RuntimeError("lost the GPU")
    )
    with pytest.raises(AgentError):
        world.run(Does(act), engine=engine)


@paths
@pytest.mark.parametrize(
    "error, status", [(ValueError("too long"), 400), (RuntimeError("lost"), 500)]
)
def test_a_failure_before_the_first_token_is_a_status(world, path, error, status):
    engine = Gated(world.tokenizer, "well", "then", count=0, error=error)

    async def act(client, extra):
        answer = await extra["http_client"].post(
            url_of(extra, path), headers=key_of(extra), json=BODIES[path]
        )
        assert answer.status_code == status and str(error) in answer.text
        engine.count = -1
        await post(extra, path)

    assert len(world.run(Does(act), engine=engine)) == 1


@paths
def test_the_end_of_a_session_ends_its_streams(world, path):
    engine = Gated(world.tokenizer, "well, then")

    async def act(client, extra):
        async with opened(extra, path) as answer:
            lines = answer.aiter_lines()
            await until(lines, FIRST_TEXT[path])
            ended = await extra["http_client"].post(
                url_of(extra, "/rl/end_session"), headers=key_of(extra)
            )
            assert ended.json() == {"interactions": 0}
            rest = "\n".join([line async for line in lines])
        assert "the session has ended" in rest
        await engine.is_cancelled.wait()
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        world.run(Does(act), engine=engine)


def test_openais_own_helper_follows_a_response(world):
    async def act(client, extra):
        tool = {"type": "function", **FUNCTION, "strict": True}
        options = {"model": "policy", "input": "2+2=", "tools": [tool]}
        async with client.responses.stream(**options) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds.count("response.output_item.done") == len(final.output) == 4
        reasoning, text, call, more = final.output
        assert reasoning.type == "reasoning" and text.content[0].text == "I add."
        assert call.type == "function_call" and more.content[0].text == "\nDone."
        # All of it, sent back, is the turn that was recorded.
        echo = [item.model_dump(exclude_none=True) for item in final.output]
        for item in echo:
            item.pop("parsed_arguments", None)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
        question = {"role": "user", "content": "2+2="}
        await client.responses.create(**{**options, "input": [question, *echo, result]})

    engine = ScriptedEngine(world.tokenizer, OUTPUT, "4")
    (leaf,) = world.run(Does(act), engine=engine, export_style="concat").values()
    assert len(leaf.path()) == 2
