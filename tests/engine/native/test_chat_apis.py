"""Chats, responses and Anthropic's messages on the native server: one model, three spellings.

Replies do not depend on the seed here: temperature 0, which all three can ask for.
"""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest
from folded_streams import FOLDS, events_of
from tiny import tiny_model, write_tiny_model
from tiny_tokenizer import VOCAB_SIZE, write_byte_tokenizer

from areal.engine.native.engine import NativeEngine
from areal.engine.native.loop import EngineLoop
from areal.engine.native.server import create_app
from areal.engine.remote.native import launch_native_server
from areal.openai.apis import CHAT_APIS

pytestmark = pytest.mark.usefixtures("forked_children")

TOKEN = "token-of-this-run"
MODEL = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 2048}
HELLO = [{"role": "user", "content": "Grüße, how are you?"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
BODIES = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 40},
    "/v1/responses": {"input": HELLO, "max_output_tokens": 40},
    "/v1/messages": {"messages": HELLO, "max_tokens": 40},
}
FORCED = {
    "/v1/chat/completions": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        "tool_choice": "required",
        "max_tokens": 120,
    },
    "/v1/responses": {
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        "tool_choice": "required",
        "max_output_tokens": 120,
    },
    "/v1/messages": {
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
        "max_tokens": 120,
    },
}
paths = pytest.mark.parametrize("path", CHAT_APIS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, **MODEL)
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def url(folder):
    child, address = launch_native_server(folder, token=TOKEN, num_pages=800, setup_timeout_s=900)
    yield f"http://{address}"
    child.terminate()


@pytest.fixture(scope="module")
def http(url):
    with httpx.Client(base_url=url, headers={"x-api-key": TOKEN}, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0, timeout=300) as client:
        yield client


def body_of(path, **options):
    return {"model": "gpt-of-any-kind", "temperature": 0, **BODIES[path], **options}


def text_of(reply):
    if "choices" in reply:
        return reply["choices"][0]["message"]["content"]
    (item,) = reply["content"] if "content" in reply else reply["output"][0]["content"]
    return item["text"]


def calls_of(reply):
    """(name, arguments) of each call. Takes their ids out, which are random."""
    if "choices" in reply:
        found = reply["choices"][0]["message"]["tool_calls"]
    else:
        items = reply.get("content") or reply["output"]
        found = [item for item in items if item["type"] in ("tool_use", "function_call")]
    calls = []
    for call in found:
        call.pop("id"), call.pop("call_id", None)
        call = call.get("function", call)
        calls.append((call["name"], call.get("input") or json.loads(call["arguments"])))
    return calls


def without_ids(reply):
    """The reply less what differs when it is asked for again: names, times, cached tokens."""
    known = {**reply, "created": 0, "created_at": 0, "usage": counts_of(reply["usage"])}
    return json.loads(json.dumps(known).replace(reply["id"], "ID"))


def counts_of(usage):
    """Tokens of the prompt, cached or not, and of the output."""
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    sampled = usage.get("completion_tokens", usage.get("output_tokens"))
    return prompt + usage.get("cache_read_input_tokens", 0), sampled


def test_all_say_the_same_under_any_name(http):
    replies = [http.post(path, json=body_of(path)).json() for path in CHAT_APIS]
    assert len({text_of(reply) for reply in replies}) == 1 and text_of(replies[0])
    assert {reply["model"] for reply in replies} == {"gpt-of-any-kind"}
    unnamed = http.post("/v1/messages", json=BODIES["/v1/messages"]).json()
    assert unnamed["model"] == http.get("/v1/models").json()["data"][0]["id"]
    ((num_prompt, num_sampled),) = {counts_of(reply["usage"]) for reply in replies}
    assert num_prompt > 0 and num_sampled == 40
    chat, message, response = replies
    assert chat["choices"][0]["finish_reason"] == "length"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert message["stop_reason"] == "max_tokens"


@paths
def test_a_stream_folds_to_the_whole_reply(http, path):
    options = {"stream_options": {"include_usage": True}} if "chat" in path else {}
    whole = http.post(path, json=body_of(path)).json()
    answer = http.post(path, json=body_of(path, stream=True, **options))
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    assert len(events) > 8, "piece by piece"
    assert without_ids(FOLDS[path](events)) == without_ids(whole)


@paths
def test_a_forced_call(http, path):
    pytest.importorskip("llguidance", reason="constrained output needs the extra `grammar`")
    options = {"stream_options": {"include_usage": True}} if "chat" in path else {}
    whole = http.post(path, json=body_of(path, **FORCED[path])).json()
    asked = body_of(path, stream=True, **FORCED[path], **options)
    folded = FOLDS[path](events_of(http.post(path, json=asked).text))
    (name, arguments), *_ = calls_of(whole)
    assert name == "f" and arguments["a"] in (1, 2)
    assert calls_of(folded)[0] == (name, arguments)
    assert without_ids(folded) == without_ids(whole)


def test_stop_sequences(http):
    path = "/v1/messages"
    text = text_of(http.post(path, json=body_of(path)).json())
    start = next(i for i in range(4, len(text)) if "\ufffd" not in text[i : i + 2])
    stop = text[start : start + 2]
    for stream in (False, True):
        asked = body_of(path, stop_sequences=["never there", stop], stream=stream)
        answer = http.post(path, json=asked)
        reply = FOLDS[path](events_of(answer.text)) if stream else answer.json()
        assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", stop)
        assert text_of(reply) == text[: text.find(stop)]


def test_openais_client_follows_a_response(client):
    options = {"model": "m", "input": "Hi", "max_output_tokens": 20, "extra_body": {"seed": 5}}
    whole = client.responses.create(**options)
    first, *_, last = client.responses.create(**options, stream=True)
    assert first.type == "response.created" and last.type == f"response.{whole.status}"
    assert last.response.output_text == whole.output_text
    assert last.response.usage.total_tokens == whole.usage.total_tokens
    echo = [item.model_dump(exclude_none=True) for item in whole.output]
    turns = [{"role": "user", "content": "Hi"}, *echo, {"role": "user", "content": "And?"}]
    more = client.responses.create(**{**options, "input": turns})
    assert more.usage.input_tokens > whole.usage.total_tokens


def test_nothing_is_remembered(client):
    first = client.responses.create(model="m", input="Hi", max_output_tokens=2)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="keeps no responses") as caught:
            client.responses.create(
                model="m", input="And?", previous_response_id=first.id, stream=stream
            )
        assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize(
    ("changes", "status", "kind", "said"),
    [
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"temperature": -1}, 400, "invalid_request_error", "temperature"),
        ({"messages": [{"role": "user", "content": "a" * 3000}]}, 400, "invalid_request_error",
         "prompt is too long"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400,
         "invalid_request_error", "content[0].source"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_has_anthropics_shape(http, stream, changes, status, kind, said):
    answer = http.post("/v1/messages", json=body_of("/v1/messages", stream=stream, **changes))
    reply = answer.json()
    assert (answer.status_code, reply["type"], reply["error"]["type"]) == (status, "error", kind)
    assert said in reply["error"]["message"]


def test_keys_and_paths(http):
    version = {"anthropic-version": "2023-06-01"}
    for path in ("/v1/messages", "/v1/v1/messages"):
        refused = http.post(path, json={}, headers={"x-api-key": "wrong", **version})
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
    refused = http.get("/v1/nowhere", headers=version).json()
    assert refused["error"]["type"] == "not_found_error"
    for path in CHAT_APIS:
        answer = http.post(f"/v1{path}", json=body_of(path, stream=True))
        assert answer.status_code == 200 and len(events_of(answer.text)) > 8
    assert len(http.get("/v1/v1/models").json()["data"]) == 1
    assert http.head("/").status_code == http.get("/api/hello").status_code == 200


async def posted(app, path, body, on_data):
    """(status, all of the answer); `on_data` sees each piece of it when it is sent."""
    pieces, status, asked = [], [], [json.dumps(body).encode()]

    async def receive():
        if not asked:
            await asyncio.Event().wait()  # the client stays
        return {"type": "http.request", "body": asked.pop(), "more_body": False}

    async def send(message):
        if message["type"] == "http.response.start":
            status.append(message["status"])
        else:
            pieces.append(message["body"].decode())
            on_data(pieces[-1])

    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": path, "query_string": b"",
        "headers": [(b"authorization", f"Bearer {TOKEN}".encode())],
    }  # fmt: skip
    async with asyncio.timeout(60):
        await app(scope, receive, send)
    return status[0], "".join(pieces)


KEEP_ALIVES = {path: api.events.keep_alive.decode() for path, api in CHAT_APIS.items()}


def paused(folder):
    loop = EngineLoop(NativeEngine(tiny_model(**MODEL), num_pages=50))
    loop.pause()
    return loop, create_app(loop, TOKEN, model=str(folder), silence_s=0.02)


@paths
async def test_a_long_wait_is_not_silent(folder, path):
    loop, app = paused(folder)
    seen = []

    def wait_for_two(data):
        seen.append(data)
        if sum(KEEP_ALIVES[path] in one for one in seen) == 2:
            loop.resume()

    status, text = await posted(app, path, body_of(path, stream=True), wait_for_two)
    assert status == 200 and text.count(KEEP_ALIVES[path]) >= 2
    folded = FOLDS[path](events_of(text))
    assert text_of(folded)
    loop.close()


@paths
async def test_a_failure_in_the_middle_is_an_event(folder, path):
    loop, app = paused(folder)
    threads = []

    def end(data):
        if not threads:  # it joins the engine's thread
            threads.append(asyncio.create_task(asyncio.to_thread(loop.close)))

    status, text = await posted(app, path, body_of(path, stream=True), end)
    await threads[0]
    events = events_of(text)
    assert status == 200 and "[DONE]" not in text
    if path == "/v1/messages":
        assert events[-1]["error"]["type"] == "overloaded_error"
    elif path == "/v1/responses":
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
    else:
        assert "closed" in events[-1]["error"]["message"]


@paths
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_it_is_a_status(folder, path, stream):
    loop, app = paused(folder)
    loop.close()
    status, text = await posted(app, path, body_of(path, stream=stream), lambda data: None)
    error = json.loads(text)
    assert status == 503 and "closed" in error["error"]["message"]
    assert ("type" in error) == (path == "/v1/messages")
