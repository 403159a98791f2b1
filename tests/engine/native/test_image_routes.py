"""Images over HTTP and through the engine's clients: every spelling is the same prompt."""

from __future__ import annotations

import asyncio
import base64
import threading
from contextlib import contextmanager

import httpx
import pytest
import uvicorn
from image_prompts import END, IMAGE, START, picture, write_seeing_model, write_tokenizer

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import ModelRequest
from areal.engine.native.engine import NativeEngine
from areal.engine.native.local_engine import NativeLocalEngine
from areal.engine.native.loop import EngineLoop
from areal.engine.native.server import create_app
from areal.engine.remote.native import NativeRemoteEngine

TOKEN = "token-of-this-run"
PICTURE = picture(1, 16, 24)  # 6 image tokens
OTHER = picture(2, 16, 24)
URL = f"data:image/png;base64,{PICTURE}"
# <s> hi, START, the image, END, you </s> <s>
PROMPT_TOKENS = 1 + 2 + 1 + 6 + 1 + 3 + 1 + 1
OPTIONS = GenerationHyperparameters(max_new_tokens=8, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_seeing_model(tmp_path_factory.mktemp("model"))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "one.png").write_bytes(base64.b64decode(PICTURE))
    return folder


@pytest.fixture(scope="module")
def address(folder, pictures):
    loop = EngineLoop(NativeEngine.from_pretrained(folder, num_pages=400))
    app = create_app(loop, TOKEN, model=str(folder), image_folders=[pictures])
    with served(app) as address:
        yield address
    loop.close()
    app.state.weights.close()


@contextmanager
def served(app):
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.01)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    try:
        yield f"{host}:{port}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def http(address):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=f"http://{address}", headers=headers, timeout=900) as client:
        yield client


def bodies(url: str) -> dict[str, dict]:
    """One chat in three spellings."""
    source = {"type": "base64", "media_type": "image/png", "data": url.rpartition(",")[2]}
    if not url.startswith("data:"):
        source = {"type": "url", "url": url}

    def content(text: str, image: dict) -> list[dict]:
        return [{"type": text, "text": "hi"}, image, {"type": text, "text": "you"}]

    chat = content("text", {"type": "image_url", "image_url": {"url": url, "detail": "low"}})
    responses = content("input_text", {"type": "input_image", "image_url": url})
    messages = content("text", {"type": "image", "source": source})
    return {
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": chat}],
            "max_tokens": 8,
            "return_token_ids": True,
        },
        "/v1/responses": {
            "input": [{"role": "user", "content": responses}],
            "max_output_tokens": 8,
        },
        "/v1/messages": {"messages": [{"role": "user", "content": messages}], "max_tokens": 8},
    }


def usage_of(reply: dict) -> int:
    usage = reply["usage"]
    cached = usage.get("cache_read_input_tokens") or 0
    return usage.get("prompt_tokens") or usage["input_tokens"] + cached


@pytest.mark.parametrize("path", bodies(URL))
def test_a_chat_with_an_image_in_every_spelling(http, pictures, path):
    for url in (URL, f"file://{pictures}/one.png"):
        answer = http.post(path, json=bodies(url)[path])
        assert answer.status_code == 200, answer.text
        assert usage_of(answer.json()) == PROMPT_TOKENS


def test_the_prompt_of_a_chat_has_a_token_for_each_merged_patch(http):
    path = "/v1/chat/completions"
    reply = http.post(path, json=bodies(URL)[path]).json()
    prompt = reply["prompt_token_ids"]
    place = prompt.index(IMAGE)
    assert prompt[place - 1 : place + 7] == [START, *[IMAGE] * 6, END]


def test_tokens_of_a_chat_with_an_image_are_counted(http):
    body = bodies(URL)["/v1/messages"]
    body.pop("max_tokens")
    reply = http.post("/v1/messages/count_tokens", json=body).json()
    assert reply == {"input_tokens": PROMPT_TOKENS}


def test_a_tool_can_answer_with_an_image(http):
    source = {"type": "base64", "media_type": "image/png", "data": PICTURE}
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a"}
    image = {"type": "image", "source": source}
    messages = [
        {"role": "user", "content": "see"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{**result, "content": [image]}]},
    ]
    answer = http.post("/v1/messages", json={"messages": messages, "max_tokens": 4})
    assert answer.status_code == 200, answer.text
    # <s>see</s> <s></s> <s>START image END</s> <s>
    assert usage_of(answer.json()) == 5 + 2 + 10 + 1


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://example.com/a.png", "not fetched"),
        ("file:///etc/passwd", "no file below a permitted folder"),
        ("data:image/png;base64,AAAA", "begins with"),
        ("data:image/svg+xml;base64,PHN2Zz4=", "begins with"),
        ("", "expected"),
    ],
)
@pytest.mark.parametrize("path", bodies(URL))
def test_an_image_that_is_not_taken_is_a_400(http, path, url, says):
    answer = http.post(path, json=bodies(url)[path])
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_only_users_and_tools_show_images(http, role):
    part = {"type": "image_url", "image_url": {"url": URL}}
    body = {"messages": [{"role": role, "content": [part]}, {"role": "user", "content": "hi"}]}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "no images" in answer.json()["error"]["message"]


def test_a_text_that_spells_an_image_token_is_refused(http):
    body = {"messages": [{"role": "user", "content": "<|image_pad|>"}], "max_tokens": 4}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "image_data is empty" in answer.json()["error"]["message"]


def generate(http, **entry) -> dict:
    gconfig = {"max_new_tokens": 8, "seed": 3, "ignore_eos": True}
    body = {"requests": [{"rid": "a", "gconfig": gconfig, **entry}]}
    answer = http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_generate_takes_expanded_and_single_placeholders(http):
    single = generate(http, input_ids=[5, START, IMAGE, END], image_data=[PICTURE])
    expanded = generate(http, input_ids=[5, START, *[IMAGE] * 6, END], image_data=[URL])
    other = generate(http, input_ids=[5, START, IMAGE, END], image_data=[OTHER])
    assert single["output_logprobs"] == expanded["output_logprobs"]
    assert single["output_logprobs"] != other["output_logprobs"]


def test_a_group_sends_its_image_once_and_a_bad_image_refuses_the_whole_group(http):
    further = [{"rid": "b", "seed": 4}, {"rid": "c", "seed": 5}]
    body = {"rid": "a", "input_ids": [START, IMAGE, END], "further": further}
    good = http.post("/generate", json={"requests": [{**body, "image_data": [PICTURE]}]})
    assert good.status_code == 200 and len(good.text.splitlines()) == 3
    bad = http.post("/generate", json={"requests": [{**body, "image_data": ["AAAA"]}]})
    assert bad.status_code == 400 and "image_data[0]" in bad.json()["error"]


async def test_clients_here_and_remote_say_the_same(folder, address):
    request = ModelRequest([5, START, *[IMAGE] * 6, END], OPTIONS, image_data=[PICTURE])
    local = NativeLocalEngine(folder, num_pages=200)
    local.initialize()
    remote = NativeRemoteEngine([address], TOKEN)
    remote.initialize()
    try:
        here = await local.agenerate(request)
        there, blind = await asyncio.gather(
            remote.agenerate(request), remote.agenerate(ModelRequest([5, 6], OPTIONS))
        )
        group = await remote.agenerate_group(request, [3, 4])
        with pytest.raises(ValueError, match="image_data"):
            await remote.agenerate(ModelRequest([5, IMAGE], OPTIONS, image_data=["AAAA"]))
    finally:
        local.destroy()
        remote.destroy()
    assert here.output_tokens == there.output_tokens
    assert there.output_logprobs == pytest.approx(here.output_logprobs, abs=1e-5)
    assert group[0].tokens.tolist() == here.output_tokens
    assert blind.output_tokens != there.output_tokens
