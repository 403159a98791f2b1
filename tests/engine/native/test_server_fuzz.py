"""Every route of a native server against requests nobody meant to send."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import http_fuzz
import json_fuzz
import pytest
import requests
import schemathesis
from http_fuzz import NOISE, bearer, is_allowed
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import write_tiny_model
from tiny_tokenizer import VOCAB_SIZE, write_byte_tokenizer

from areal.engine.remote.native import launch_native_server

pytestmark = pytest.mark.usefixtures("forked_children")

NUM_EXAMPLES = int(os.environ.get("AREAL_FUZZ_EXAMPLES", "5"))  # of each route
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
GROUP = {"name": "g", "host": "127.0.0.1", "port": 9, "rank": 1, "world_size": 2, "timeout_s": 1.0}
HONEST = {
    "/generate": {"requests": [{"rid": "a", "input_ids": [2, 3], "gconfig": OPTIONS}]},
    "/score": {"sequences": [[1, 2, 3], [4, 5]]},
    "/abort": {"rid": "a", "all": False},
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": ["2+2=", [2, 3]], "max_tokens": 2, "stop": ["b"], "echo": False},
    "/v1/responses": {
        "model": "",
        "instructions": "be kind",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "4"},
        ],
        "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}],
        "max_output_tokens": 2,
        "stream": True,
    },
    "/v1/messages": {
        "model": "",
        "system": [{"type": "text", "text": "be kind"}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "max_tokens": 2,
        "stop_sequences": ["x"],
        "stream": True,
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "2+2?"}]},
    "/inference/v1/generate": {
        "token_ids": [5, 6],
        "sampling_params": {"max_tokens": 2, "temperature": 0.5, "logprobs": 0},
    },
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
        root / "tiny", token=TOKEN, num_pages=200, log_path=root / "log", setup_timeout_s=900
    )
    yield Served(f"http://{address}", root / "log")
    child.terminate()


def post(server, path, body=None):
    return requests.post(server.url + path, headers=bearer(TOKEN), json=body, timeout=900)


def serves(server):
    for path, body in HONEST.items():
        answer = post(server, path, body)
        assert answer.status_code == 200, (path, answer.text)
    health = requests.get(f"{server.url}/health", headers=bearer(TOKEN), timeout=900).json()
    assert health["status"] == "ok"
    assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
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
        length = "max_output_tokens" if case.path == "/v1/responses" else "max_tokens"
        case.body |= {"model": "", "n": 1, "max_completion_tokens": None, length: 2}
    elif case.path == "/init_weights_group":
        case.body["backend"] = "mpi"  # is refused: nobody will come


def known(ids):
    return [token % VOCAB_SIZE for token in ids]


def test_any_body_is_answered(server):
    bodies = {
        **HONEST,
        "/offload": {"tags": ["kv_cache"]},
        "/update_weights": {"kind": "folder", "path": "/nowhere", "version": 1},
        "/init_weights_group": {**GROUP, "backend": "mpi"},  # refused: nobody will come
    }

    def send(path):
        @settings(max_examples=5 * NUM_EXAMPLES)
        @given(json_fuzz.bodies(bodies[path]))
        def one(body):
            answer = requests.post(
                server.url + path, headers=bearer(TOKEN), data=body, timeout=http_fuzz.TIMEOUT_S
            )
            http_fuzz.check(answer.status_code, answer.text, body)

        one()

    for path in bodies:
        send(path)
        post(server, "/onload")
    serves(server)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"timeout_s": 1e300}, "timeout_s"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": True}, "timeout_s"),
        ({"port": -1}, "port"),
        ({"port": 65536}, "port"),
        ({"port": True}, "port"),
        ({"world_size": 2**63 - 1}, "world_size"),
        ({"world_size": 1}, "world_size"),
        ({"rank": 0}, "rank"),
        ({"rank": 2}, "rank"),
        ({"host": ""}, "host"),
        ({"host": "a\0b"}, "host"),
        ({"host": "x" * 5000}, "host"),
        ({"name": ""}, "name"),
        ({"backend": "mpi"}, "backend"),
    ],
)
def test_a_group_that_cannot_be(server, change, named):
    answer = post(server, "/init_weights_group", {**GROUP, "backend": "gloo", **change})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"].startswith(f"{named}: expected")


@pytest.mark.parametrize("host", ["x" * 300, "[", "127.0.0.1"])
def test_a_group_that_nobody_opened(server, host):
    order = {**GROUP, "backend": "gloo", "host": host, "timeout_s": 0.5}
    answer = post(server, "/init_weights_group", order)
    assert answer.status_code in (400, 502), answer.text
    serves(server)


def odd_manifests(root):
    """Folders whose manifest.json is not a file that can be read."""
    kinds = {
        "fifo": os.mkfifo,
        "folder": os.mkdir,
        "device": lambda path: os.symlink("/dev/zero", path),
        "loop": lambda path: os.symlink(path, path),
        "nowhere": lambda path: os.symlink("/nowhere", path),
        "huge": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
        "deep": lambda path: path.write_bytes(b"[" * 100_000),
    }
    for name, make in kinds.items():
        for file in ("manifest.json", "handles.json"):
            folder = root / f"{name}-{file}"
            folder.mkdir()
            make(folder / file)
            yield folder


def test_a_publication_that_is_no_files(server, tmp_path):
    (tmp_path / "locked").mkdir(mode=0)
    paths = [
        *odd_manifests(tmp_path),
        tmp_path / "locked" / "x",
        tmp_path / ("x" * 300),
        tmp_path / ("x/" * 1500),
        "/dev/null",
        "relative",
    ]
    for kind in ("folder", "delta"):
        for path in paths:
            order = {"kind": kind, "path": str(path), "version": 1}
            answer = post(server, "/update_weights", order)
            assert answer.status_code == 400, (path, answer.text)
    for path in ("", "a\0b", "x" * 5000):
        answer = post(server, "/update_weights", {"path": path, "version": 1})
        assert answer.status_code == 400 and answer.json()["error"].startswith("path: expected")
    for version in (-1, 2**31, 2**63, True, 1.5):
        answer = post(server, "/update_weights", {"path": "/x", "version": version})
        assert answer.status_code == 400 and "version: expected" in answer.json()["error"]
    serves(server)


@pytest.mark.slow
def test_strangers_starve_nobody(server):
    """Idle connections and slow writers, hundreds of them: who has the token is served at once, and
    they are closed."""
    address = urlsplit(server.url)
    begins = [b"", b"POST /generate HTTP/1.1\r\nHost: x", STRANGER + b"x"]
    with contextlib.ExitStack() as stack:
        strangers = []
        for number in range(600):
            stranger = socket.create_connection((address.hostname, address.port), timeout=900)
            strangers.append(stack.enter_context(stranger))
            stranger.sendall(begins[number % 3])
        until = time.monotonic() + 25
        while time.monotonic() < until:
            serves(server)
            for stranger in strangers[1::3]:
                with contextlib.suppress(OSError):
                    stranger.send(b"x")
            time.sleep(2.0)  # slow writers
        assert all(map(http_fuzz.is_closed, strangers)), "each had 20 s"


STRANGER = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n"


def test_no_server_redirects(server):
    """A client that follows would hand its token to whomever the Host header names."""
    hosts = ["evil.example", "[", "a b", "evil.example:99999", ""]
    paths = [
        "/health/",
        "//health",
        "/health//",
        "/v1/models/",
        "/generate/",
        "/./health",
        "/%2e%2e/",
    ]
    targets = [
        *paths,
        "http://evil.example/health",
        "http://evil.example//health/",
        "//evil.example/",
    ]
    for target in targets:
        for host in hosts:
            for method in ("GET", "POST", "HEAD", "OPTIONS"):
                status, headers = raw_request(server, method, target, host)
                assert not 300 <= status < 400 and status < 500, (method, target, host, status)
                assert b"location:" not in headers.lower()


def raw_request(server, method, target, host):
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=900) as connection:
        head = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        connection.sendall(f"{head}Authorization: Bearer {TOKEN}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[0]


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
        server.url + path, params={"since": text}, headers=bearer(TOKEN), timeout=900
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
        method, server.url + path, headers={"Authorization": value}, data=b"{}", timeout=900
    )
    assert answer.status_code in (400, 401)  # 400: no header that HTTP knows
    assert answer.status_code == 401 or b"Invalid HTTP request" in answer.content
