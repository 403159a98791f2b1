"""Every route of the native server against requests nobody meant to send."""

from __future__ import annotations

import os

import http_fuzz
import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import write_tiny_model
from tiny_tokenizer import VOCAB_SIZE, write_byte_tokenizer

from areal.engine.native.engine import NativeEngine
from areal.engine.native.loop import EngineLoop
from areal.engine.native.server import create_app

NUM_EXAMPLES = int(os.environ.get("AREAL_FUZZ_EXAMPLES", "200"))
TOKEN = "token-of-this-run"
OPTIONS = {"max_new_tokens": 2, "temperature": 0.5, "stop": ["a"], "seed": 1, "top_k": 3}
CHAT = {
    "model": "",
    "messages": [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
    ],
    "max_tokens": 2,
    "temperature": 0.5,
    "n": 1,
    "stop": "a",
    "seed": 3,
    "stream": True,
    "logprobs": True,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "stream_options": {"include_usage": True},
}
EXAMPLES = {
    "/generate": {"requests": [{"rid": "a", "input_ids": [2, 3], "gconfig": OPTIONS}]},
    "/pause": {},
    "/continue": {},
    "/update_weights": {"kind": "folder", "path": "/tmp", "version": 1, "recompute_kv": True},
    # Of a kind that is refused: a group that nobody opens would be waited for.
    "/init_weights_group": {
        "name": "g",
        "host": "127.0.0.1",
        "port": 1,
        "rank": 1,
        "world_size": 2,
        "backend": "mpi",
        "timeout_s": 0.1,
    },
    "/score": {"sequences": [[1, 2, 3], [4, 5]]},
    "/offload": {"tags": ["kv_cache"]},
    "/onload": {"tags": ["kv_cache"]},
    "/abort": {"rid": "a", "all": False},
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": ["2+2=", [2, 3]], "max_tokens": 2, "stop": ["b"], "echo": False},
}


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, vocab_size=VOCAB_SIZE, max_position_embeddings=320)
    write_byte_tokenizer(folder)
    loop = EngineLoop(NativeEngine.from_pretrained(folder, num_pages=200))
    yield create_app(loop, TOKEN, model=str(folder))
    loop.close()


@pytest.fixture(scope="module")
def client(app):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with TestClient(app, raise_server_exceptions=False, headers=headers) as client:
        yield client


def test_no_route_falls_over(app, client):
    @settings(max_examples=NUM_EXAMPLES)
    @given(http_fuzz.requests_of(app, EXAMPLES))
    def ask(request):
        method, path, headers, body = request
        answer = client.request(method, path, headers=headers, content=body)
        http_fuzz.check(answer.status_code, answer.text, request)
        if path in ("/pause", "/offload"):  # what follows would wait
            assert client.post("/continue").status_code == 200
            assert client.post("/onload").status_code == 200

    for path in ("/generate", "/score", "/v1/chat/completions", "/v1/completions"):
        assert client.post(path, json=EXAMPLES[path]).status_code == 200, path
    ask()
    assert client.post("/generate", json=EXAMPLES["/generate"]).status_code == 200
    assert client.get("/health").json()["status"] == "ok"


@given(st.text(max_size=20), st.sampled_from(["/busy_intervals", "/stats", "/health"]))
def test_queries(app, client, text, path):
    answer = client.get(path, params={"since": text})
    http_fuzz.check(answer.status_code, answer.text, text)


@given(st.binary(max_size=60), st.sampled_from(sorted(EXAMPLES)), st.sampled_from(["GET", "POST"]))
def test_only_the_token_opens(app, value, path, method):
    with TestClient(app, raise_server_exceptions=False) as stranger:
        given_headers = [(b"authorization", value.replace(b"\n", b"").replace(b"\r", b""))]
        answer = stranger.request(method, path, headers=given_headers, content=b"{}")
        assert answer.status_code == 401
