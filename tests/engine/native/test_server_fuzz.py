"""Every route of a native server against requests nobody meant to send."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import http_fuzz
import pytest
import requests
import schemathesis
from http_fuzz import NOISE, bearer, is_allowed
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import write_tiny_model
from tiny_tokenizer import VOCAB_SIZE, write_byte_tokenizer

from areal.engine.native.remote_engine import launch_native_server

NUM_EXAMPLES = int(os.environ.get("AREAL_FUZZ_EXAMPLES", "10"))  # of each route
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
HONEST = {
    "/generate": {"requests": [{"rid": "a", "input_ids": [2, 3], "gconfig": OPTIONS}]},
    "/score": {"sequences": [[1, 2, 3], [4, 5]]},
    "/abort": {"rid": "a", "all": False},
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": ["2+2=", [2, 3]], "max_tokens": 2, "stop": ["b"], "echo": False},
}


@dataclass
class Served:
    url: str
    log: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("server")
    write_tiny_model(root / "tiny", vocab_size=VOCAB_SIZE, max_position_embeddings=320)
    write_byte_tokenizer(root / "tiny")
    child, address = launch_native_server(
        root / "tiny", token=TOKEN, num_pages=200, log_path=root / "log", setup_timeout_s=120
    )
    yield Served(f"http://{address}", root / "log")
    child.terminate()


def post(server, path, body=None):
    return requests.post(server.url + path, headers=bearer(TOKEN), json=body, timeout=60)


def serves(server):
    for path, body in HONEST.items():
        answer = post(server, path, body)
        assert answer.status_code == 200, (path, answer.text)
    health = requests.get(f"{server.url}/health", headers=bearer(TOKEN), timeout=60).json()
    assert health["status"] == "ok"
    assert "Traceback" not in server.log.read_text()


def test_no_route_falls_over(server):
    description = schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=bearer(TOKEN))

    def send(case):
        soften(case)
        http_fuzz.ask(case, server.url, TOKEN)
        if case.path in ("/pause", "/offload"):  # what follows would wait
            assert post(server, "/continue").status_code == 200
            assert post(server, "/onload").status_code == 200

    http_fuzz.every_route(description, send, max_examples=NUM_EXAMPLES)
    serves(server)


def soften(case):
    """Of what is allowed: ids that the model has, and nothing that would take long."""
    if not is_allowed(case) or not isinstance(case.body, dict):
        return
    if case.path == "/generate":
        for request in case.body["requests"]:
            request["input_ids"] = known(request["input_ids"])
            request.setdefault("gconfig", {})["max_new_tokens"] = 2
    elif case.path == "/score":
        case.body["sequences"] = [known(ids) for ids in case.body["sequences"]]
    elif case.path.startswith("/v1/"):
        case.body |= {"model": "", "n": 1, "max_tokens": 2, "max_completion_tokens": None}
    elif case.path == "/init_weights_group":
        case.body["backend"] = "mpi"  # is refused: nobody will come


def known(ids):
    return [token % VOCAB_SIZE for token in ids]


def test_noise(server):
    paths = [*HONEST, "/update_weights", "/init_weights_group", "/offload", "/nowhere"]

    @settings(max_examples=10 * NUM_EXAMPLES)
    @given(st.sampled_from(paths), NOISE)
    def send(path, noise):
        http_fuzz.send_noise(server.url + path, TOKEN, noise)

    send()
    post(server, "/onload")
    serves(server)


@settings(max_examples=30)
@given(st.text(max_size=20), st.sampled_from(["/busy_intervals", "/stats", "/v1/models/"]))
def test_queries(server, text, path):
    answer = requests.get(
        server.url + path, params={"since": text}, headers=bearer(TOKEN), timeout=60
    )
    http_fuzz.check(answer.status_code, answer.text, text)


@settings(max_examples=30)
@given(
    st.binary(max_size=60).map(lambda value: value.replace(b"\n", b"").replace(b"\r", b"").strip()),
    st.sampled_from([*HONEST, "/openapi.json", "/docs", "/health"]),
    st.sampled_from(["GET", "POST"]),
)
def test_only_the_token_opens(server, value, path, method):
    answer = requests.request(
        method, server.url + path, headers={"Authorization": value}, data=b"{}", timeout=60
    )
    assert answer.status_code in (400, 401)  # 400: no header that HTTP knows
    assert answer.status_code == 401 or b"Invalid HTTP request" in answer.content
