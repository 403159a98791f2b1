"""The OpenAI routes over real HTTP, asked by the real `openai` client.

What the three APIs of chats have in common is in test_chat_apis.py.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import time

import httpx
import openai
import pytest
import torch
from fastapi.testclient import TestClient
from tiny import tiny_model, write_tiny_model
from tiny_tokenizer import VOCAB_SIZE, write_byte_tokenizer

from areal.engine.native.engine import NativeEngine
from areal.engine.native.loop import EngineLoop
from areal.engine.native.server import create_app
from areal.engine.remote.native import launch_native_server
from areal.engine.remote.server_control import ControlClient
from areal.openai.parsing.parser import begins_in_reasoning
from areal.openai.prompts import chat_prompt_ids
from areal.openai.requests import parse_chat
from areal.weight_sync.publication import publish

pytestmark = pytest.mark.usefixtures("forked_children")

TOKEN = "token-of-this-run"
HELLO = [{"role": "user", "content": "Grüße, how are you?"}]
SAMPLING = {"max_tokens": 24, "seed": 7, "extra_body": {"ignore_eos": True}}
TOOL = {"type": "function", "function": {"name": "f"}}
MODEL = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 2048}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, **MODEL)
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return write_byte_tokenizer(folder)


@pytest.fixture(scope="module")
def address(folder):
    child, address = launch_native_server(folder, token=TOKEN, num_pages=800, setup_timeout_s=900)
    yield address
    child.terminate()


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(
        base_url=f"http://{address}/v1", api_key=TOKEN, max_retries=0, timeout=900
    ) as client:
        yield client


@pytest.fixture
def control(address):
    control = ControlClient(address, TOKEN, timeout_s=300)
    yield control
    control.post("/continue")
    control.post("/abort", all=True)


def generate(control, ids, **options):
    """What /generate says to the same prompt."""
    gconfig = {"max_new_tokens": 24, "seed": 7, "ignore_eos": True, **options}
    return control.post("/generate", requests=[{"rid": "g", "input_ids": ids, "gconfig": gconfig}])


def wait_until(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def joined(chunks):
    """Per choice of a streamed reply: (text, log-probabilities, finish reason)."""
    texts, logprobs, reasons = {}, {}, {}
    for chunk in chunks:
        for choice in chunk.choices:
            is_chat = hasattr(choice, "delta")
            text = (choice.delta.content or "") if is_chat else choice.text
            texts[choice.index] = texts.get(choice.index, "") + text
            said = choice.logprobs
            if said is not None:
                values = [c.logprob for c in said.content] if is_chat else said.token_logprobs
                logprobs.setdefault(choice.index, []).extend(values)
            if choice.finish_reason is not None:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    return texts, logprobs, reasons


def test_models(client, folder):
    (model,) = client.models.list().data
    assert model.id == str(folder)
    assert client.models.retrieve("gpt-of-any-kind").id == "gpt-of-any-kind"
    reply = client.completions.create(model="gpt-of-any-kind", prompt="a", max_tokens=1)
    assert reply.model == "gpt-of-any-kind"


def test_completion_is_what_generate_says(client, control, tokenizer):
    prompt = "The answer is ü"
    ids = tokenizer(prompt)["input_ids"]
    expected = generate(control, ids)
    for given in (prompt, ids):
        reply = client.completions.create(model="tiny", prompt=given, logprobs=0, **SAMPLING)
        (choice,) = reply.choices
        assert choice.text == tokenizer.decode(expected["output_tokens"], skip_special_tokens=True)
        assert choice.logprobs.token_logprobs == expected["output_logprobs"]
        assert choice.finish_reason == "length"
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(ids), 24)
        assert reply.object == "text_completion" and reply.model == "tiny"


def test_chat_is_what_generate_says(client, control, tokenizer):
    ids = chat_prompt_ids(tokenizer, parse_chat({"messages": HELLO}))
    expected = generate(control, ids, temperature=0.7, top_p=0.9)
    reply = client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, temperature=0.7, top_p=0.9, **SAMPLING
    )
    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    text = tokenizer.decode(expected["output_tokens"], skip_special_tokens=True)
    assert choice.message.content == text
    said = choice.logprobs.content
    assert [entry.logprob for entry in said] == expected["output_logprobs"]
    raw = b"".join(bytes(entry.bytes) for entry in said if not entry.token.startswith("<|"))
    assert raw.decode(errors="replace") == text
    assert reply.usage.prompt_tokens == len(ids)


def test_several_prompts_and_samples(client):
    prompts = ["one", "two"]
    reply = client.completions.create(model="tiny", prompt=prompts, n=3, **SAMPLING)
    assert [choice.index for choice in reply.choices] == list(range(6))
    texts = [choice.text for choice in reply.choices]
    assert len(set(texts)) == 6
    for i, prompt in enumerate(prompts):
        for sample in range(3):
            options = {**SAMPLING, "seed": SAMPLING["seed"] + sample}
            alone = client.completions.create(model="tiny", prompt=prompt, **options)
            assert alone.choices[0].text == texts[3 * i + sample]
    ids = [[70, 71], [72]]
    assert len(client.completions.create(model="tiny", prompt=ids, **SAMPLING).choices) == 2


def test_tokens_in_tokens_out(client, control, tokenizer):
    ids = tokenizer("Once")["input_ids"]
    expected = generate(control, ids)
    sampling = {"max_tokens": 24, "seed": 7, "ignore_eos": True, "logprobs": 0}
    body = {"token_ids": ids, "sampling_params": sampling, "request_id": "mine"}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    url = str(client.base_url).removesuffix("v1/")
    reply = httpx.post(
        f"{url}inference/v1/generate", json=body, headers=headers, timeout=300
    ).json()
    (choice,) = reply["choices"]
    assert reply["request_id"] == "mine"
    assert choice["token_ids"] == expected["output_tokens"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert logprobs == expected["output_logprobs"]
    body["sampling_params"]["logprobs"] = 3
    refused = httpx.post(f"{url}inference/v1/generate", json=body, headers=headers, timeout=300)
    assert refused.status_code == 400 and "send logprobs=0" in refused.json()["error"]["message"]


def test_tokens_of_messages_are_counted(client, tokenizer):
    url, headers = f"{client.base_url}messages/count_tokens", {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx.post(url, json={"messages": HELLO}, headers=headers, timeout=300)
    count = len(chat_prompt_ids(tokenizer, parse_chat({"messages": HELLO})))
    assert answer.json() == {"input_tokens": count}
    refused = httpx.post(url, json={"messages": []}, headers=headers, timeout=300).json()
    assert refused["type"] == "error" and refused["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned(client, tokenizer, stream):
    options = {**SAMPLING, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    reply = client.chat.completions.create(model="m", messages=HELLO, stream=stream, **options)
    parts = [one.model_dump() for one in reply] if stream else [reply.model_dump()]
    choices = [choice for part in parts for choice in part["choices"]]
    tokens = sum((choice.get("token_ids") or [] for choice in choices), [])
    prompt = chat_prompt_ids(tokenizer, parse_chat({"messages": HELLO}))
    assert parts[0]["prompt_token_ids"] == prompt and len(tokens) == 24
    reply = client.completions.create(model="m", prompt=prompt, stream=stream, **options)
    parts = [one.model_dump() for one in reply] if stream else [reply.model_dump()]
    choices = [choice for part in parts for choice in part["choices"]]
    assert sum((choice["token_ids"] for choice in choices), []) == tokens
    assert choices[0]["prompt_token_ids"] == prompt


def test_a_final_message_of_the_assistant_is_continued(client, tokenizer):
    begun = [*HELLO, {"role": "assistant", "content": "Fine"}]
    reply = client.chat.completions.create(model="m", messages=begun, **SAMPLING)
    prompt = chat_prompt_ids(tokenizer, parse_chat({"messages": HELLO}))
    ids = [*prompt, *tokenizer("Fine")["input_ids"]]
    same = client.completions.create(model="m", prompt=ids, **SAMPLING)
    assert reply.choices[0].message.content == same.choices[0].text


def test_seeds(client):
    def text(**options):
        reply = client.chat.completions.create(model="tiny", messages=HELLO, **options)
        return reply.choices[0].message.content

    assert text(seed=3, max_tokens=20) == text(seed=3, max_completion_tokens=20)
    assert text(seed=3, max_tokens=20) != text(seed=4, max_tokens=20)
    assert text(max_tokens=20) != text(max_tokens=20)
    assert text(temperature=0, max_tokens=20) == text(temperature=0, max_tokens=20)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_stream_says_the_same(client, seed):
    options = {**SAMPLING, "max_tokens": 40, "seed": seed, "model": "tiny", "n": 2}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    whole = client.chat.completions.create(messages=HELLO, logprobs=True, **options)
    chunks = list(client.chat.completions.create(messages=HELLO, logprobs=True, **options, **usage))
    texts, logprobs, reasons = joined(chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert logprobs[choice.index] == [entry.logprob for entry in choice.logprobs.content]
        assert reasons[choice.index] == "length"
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len(chunks) > 40 and len({chunk.id for chunk in chunks}) == 1

    whole = client.completions.create(prompt="Once", logprobs=0, **options)
    chunks = list(client.completions.create(prompt="Once", logprobs=0, stream=True, **options))
    texts, logprobs, _ = joined(chunks)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert logprobs == {c.index: c.logprobs.token_logprobs for c in whole.choices}


def test_pieces_come_while_the_rest_is_generated(client, control):
    options = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    with client.completions.create(model="tiny", prompt="a", stream=True, **options) as stream:
        next(iter(stream))
        assert control.get("/stats")["running"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client, control, stream):
    def ask(**options):
        reply = client.completions.create(
            model="tiny", prompt="Once", stream=stream, **{**SAMPLING, **options}
        )
        if stream:
            texts, _, reasons = joined(reply)
            return texts[0], reasons[0]
        return reply.choices[0].text, reply.choices[0].finish_reason

    text, reason = ask(max_tokens=60)
    assert reason == "length"
    start = next(i for i in range(8, len(text)) if "\ufffd" not in text[i : i + 3])
    stop = text[start : start + 3]
    before = control.get("/stats")["tokens_generated"]
    assert ask(max_tokens=60, stop=["never there", stop]) == (text[: text.find(stop)], "stop")
    assert control.get("/stats")["tokens_generated"] - before < 60
    assert ask(max_tokens=60, stop="never there") == (text, "length")


def test_generate_takes_stop_strings_too(control, tokenizer):
    ids = tokenizer("Once")["input_ids"]
    free = generate(control, ids)["output_tokens"]
    text = tokenizer.decode(free[4:7], skip_special_tokens=False)
    stopped = generate(control, ids, stop=[text])
    assert stopped["stop_reason"] == "stop"
    assert stopped["output_tokens"] == free[: len(stopped["output_tokens"])]
    assert text in tokenizer.decode(stopped["output_tokens"], skip_special_tokens=False)


def test_stop_tokens_end_the_text_before_them(client, control, tokenizer):
    ids = tokenizer("Once")["input_ids"]
    tokens = generate(control, ids)["output_tokens"]
    last = tokens[5]
    options = {"ignore_eos": True, "stop_token_ids": [last]}
    reply = client.completions.create(
        model="tiny", prompt="Once", max_tokens=24, seed=7, logprobs=0, extra_body=options
    )
    num_tokens = tokens.index(last) + 1
    (choice,) = reply.choices
    assert choice.finish_reason == "stop"
    assert choice.text == tokenizer.decode(tokens[: num_tokens - 1], skip_special_tokens=True)
    assert len(choice.logprobs.token_logprobs) == reply.usage.completion_tokens == num_tokens


def test_a_forced_call_and_a_schema(client):
    pytest.importorskip("llguidance", reason="constrained output needs the extra `grammar`")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 400}
    forced = client.chat.completions.create(
        **asked, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = forced.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["a"] in (1, 2)
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    reply = client.chat.completions.create(**asked, response_format=form)
    assert json.loads(reply.choices[0].message.content)["a"] in (1, 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "error", "param", "message"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature", "a number from 0"),
        ({"logprobs": True, "top_logprobs": 2}, openai.BadRequestError, "top_logprobs", "only"),
        ({"messages": [{"role": "user", "content": "a" * 3000}]}, openai.BadRequestError, None,
         "no room for output"),
        ({"extra_body": {"stop_token_ids": [9999]}}, openai.BadRequestError, None, "stop_token_id"),
    ],
)  # fmt: skip
def test_what_is_wrong_has_openais_shape(client, stream, options, error, param, message):
    with pytest.raises(error, match=message) as caught:
        client.chat.completions.create(
            **{"model": "tiny", "messages": HELLO, "stream": stream, "max_tokens": 5, **options}
        )
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_echo_has_the_prompts_log_probabilities(client, folder, tokenizer):
    """Those of transformers, also the most likely token at each place, as lm-eval needs them."""
    from transformers import AutoModelForCausalLM

    text = "Grüße, all"
    ids = tokenizer(text)["input_ids"]
    twin = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {"model": "tiny", "echo": True, "temperature": 0, "logprobs": 1}
    texts, numbers = [], []
    for prompt, count in ((text, 1), (ids, 1), ([text, ids], 0)):
        reply = client.completions.create(**options, prompt=prompt, max_tokens=count)
        assert reply.usage.completion_tokens == count
        for choice in reply.choices:
            texts.append(choice.text)
            numbers.append(choice.logprobs)
    with torch.no_grad():
        logprobs = twin(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    best = logprobs.max(-1).values.tolist()
    assert texts[2:] == [text, text] and texts[0] == texts[1] and texts[0].startswith(text)
    for found in numbers:
        count = len(found.tokens) - len(ids)
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        assert found.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-4)
        likely = [max(top.values()) for top in found.top_logprobs[1:]]
        assert likely == pytest.approx(best[: len(ids) - 1 + count], abs=1e-4)
        assert "".join(found.tokens[: len(ids)]) == "".join(numbers[0].tokens[: len(ids)])


def test_echo_without_log_probabilities_and_with_several_samples(client):
    reply = client.completions.create(model="tiny", prompt=["ab", "cd"], echo=True, n=2, **SAMPLING)
    assert [choice.text[:2] for choice in reply.choices] == ["ab", "ab", "cd", "cd"]
    assert reply.choices[0].logprobs is None
    alone = client.completions.create(model="tiny", prompt=["ab", "cd"], n=2, **SAMPLING)
    assert [choice.text[2:] for choice in reply.choices] == [c.text for c in alone.choices]


def test_echo_of_a_chat_is_refused_and_bodies_that_are_none(client, address):
    with pytest.raises(openai.BadRequestError, match="echo: not supported"):
        client.chat.completions.create(model="tiny", messages=HELLO, extra_body={"echo": True})
    headers = {"Authorization": f"Bearer {TOKEN}"}
    for method, path, body, status in [
        ("POST", "/v1/completions", "{", 400),
        ("POST", "/v1/chat/completions", "[]", 400),
        ("GET", "/v1/nowhere", None, 404),
        ("GET", "/v1/completions", None, 405),
    ]:
        connection = http.client.HTTPConnection(address, timeout=300)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        assert answer.status == status
        assert json.loads(answer.read())["error"]["type"] == "invalid_request_error"
        connection.close()


def test_a_wrong_key(address):
    with (
        openai.OpenAI(base_url=f"http://{address}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="Authorization") as caught,
    ):
        client.models.list()
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_pages(client, control, stream, address):
    wait_until(lambda: control.get("/stats")["running"] == 0)
    before = control.get("/stats")
    body = {"prompt": "leaving", "n": 4, "max_tokens": 1500, "stream": stream, "ignore_eos": True}
    connection = http.client.HTTPConnection(address, timeout=300)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Authorization": f"Bearer {TOKEN}"}
    )
    wait_until(lambda: control.get("/stats")["running"] == 4)
    if stream:
        answer = connection.getresponse()
        assert answer.status == 200 and answer.readline().startswith(b"data: {")
        answer.close()
    connection.close()
    wait_until(lambda: control.get("/stats")["running"] == 0)
    stats = control.get("/stats")
    assert stats["finished"] == before["finished"]  # ended, not finished
    kept = stats["pages_shared"] - before["pages_shared"]  # for prompts that begin alike
    assert stats["pages_in_use"] <= before["pages_in_use"] + kept + 1


async def test_thirty_streams_while_weights_change(address, control, tmp_path):
    versions = [101, 102, 103]
    for version in versions:
        weights = tiny_model(seed=version, **MODEL).named_hf_tensors()
        publish(weights, tmp_path / str(version), version)

    async with openai.AsyncOpenAI(
        base_url=f"http://{address}/v1", api_key=TOKEN, max_retries=0, timeout=900
    ) as client:

        async def ask(number):
            stream = await client.chat.completions.create(
                model="tiny", messages=HELLO, stream=True, seed=number, logprobs=True,
                max_tokens=80, extra_body={"ignore_eos": True},
            )  # fmt: skip
            texts, logprobs, reasons = joined([chunk async for chunk in stream])
            return texts[0], logprobs[0], reasons[0]

        async def update():
            for version in versions:
                await asyncio.sleep(0.1)
                order = {"path": str(tmp_path / str(version)), "version": version}
                await asyncio.to_thread(lambda: control.post("/update_weights", **order))  # noqa: B023

        *answers, _ = await asyncio.gather(*map(ask, range(30)), update())
    assert all(reason == "length" and len(logprobs) == 80 for _, logprobs, reason in answers)
    assert len({text for text, _, _ in answers}) == 30
    assert control.get("/health")["version"] == versions[-1]
    assert control.get("/stats")["running"] == 0


def test_a_model_without_a_tokenizer(tmp_path):
    folder = write_tiny_model(tmp_path / "bare", **MODEL)
    loop = EngineLoop(NativeEngine.from_pretrained(folder, num_pages=50))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with TestClient(create_app(loop, TOKEN, model=str(folder)), headers=headers) as client:
        for path, body in [
            ("/v1/chat/completions", {"messages": HELLO}),
            ("/v1/completions", {"prompt": [5, 6]}),
        ]:
            answer = client.post(path, json=body)
            assert answer.status_code == 400
            assert "has no tokenizer" in answer.json()["error"]["message"]
        entry = {"rid": "a", "input_ids": [5], "gconfig": {"max_new_tokens": 2}}
        assert client.post("/generate", json={"requests": [entry]}).status_code == 200
        entry["gconfig"]["stop"] = ["x"]
        answer = client.post("/generate", json={"requests": [entry]})
        assert answer.status_code == 400
        assert answer.json()["error"].startswith("gconfig.stop: the model folder")
        assert len(client.get("/v1/models").json()["data"]) == 1
    loop.close()


def test_a_template_that_takes_all_memory_is_named(tmp_path):
    folder = write_tiny_model(tmp_path / "hostile", **MODEL)
    write_byte_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content * 10**10 }}")
    loop = EngineLoop(NativeEngine.from_pretrained(folder, num_pages=50))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    app = create_app(loop, TOKEN, model=str(folder))
    with TestClient(app, headers=headers, raise_server_exceptions=False) as client:
        answer = client.post("/v1/chat/completions", json={"messages": HELLO})
        assert answer.status_code == 500
        said = answer.json()["error"]["message"]
        assert f"chat template of {folder} takes more than 1024 MiB of memory" in said
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert answer.status_code == 200
    loop.close()


def test_a_call_in_reasoning_that_the_template_opened(tmp_path):
    """The prompt tells, not the request: the same words are a call without it."""
    folder = write_tiny_model(tmp_path / "thinks", **MODEL)
    tokenizer = write_byte_tokenizer(folder)
    call = parse_chat({"messages": HELLO})
    assert not begins_in_reasoning(tokenizer, chat_prompt_ids(tokenizer, call))
    for header in ("<think>", "<think>\n", " <think> \n\n"):
        tokenizer.chat_template = f"{{{{ messages[0].content }}}}\nassistant:{header}"
        assert begins_in_reasoning(tokenizer, chat_prompt_ids(tokenizer, call))
    tokenizer.chat_template = "{{ messages[0].content }}assistant:<think>\n\n</think>\n\n"
    assert not begins_in_reasoning(tokenizer, chat_prompt_ids(tokenizer, call))
    asked = parse_chat({"messages": [{"role": "user", "content": "what is <think>"}]})
    tokenizer.chat_template = "{{ messages[0].content }}\nassistant:"
    assert not begins_in_reasoning(tokenizer, chat_prompt_ids(tokenizer, asked))


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_ended_or_lost_its_weights(folder, stream):
    """In process, because here the engine itself must break."""
    body = {"prompt": "a", "stream": stream, "max_tokens": 5, "temperature": 0}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    engine = NativeEngine(tiny_model(**MODEL), num_pages=50)
    loop = EngineLoop(engine)
    app = create_app(loop, TOKEN, model=str(folder))
    with TestClient(app, headers=headers, raise_server_exceptions=False) as client:
        engine.model.norm.weight.data.fill_(float("nan"))
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 503
        assert "not finite" in answer.json()["error"]["message"]
        loop.close()
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "server_error"
