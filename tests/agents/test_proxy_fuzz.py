"""Every route of the agents' proxy against requests nobody meant to send, over real connections."""

from __future__ import annotations

import contextlib
import os
import socket

import http_fuzz
import httpx
import json_fuzz
import pytest
import schemathesis
from http_fuzz import NOISE, is_allowed
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.agents.proxy import AgentProxy, create_app
from areal.agents.session import Session, SessionOptions
from areal.api.config.inference import AgentConfig, GenerationHyperparameters

NUM_EXAMPLES = int(os.environ.get("AREAL_FUZZ_EXAMPLES", "5"))  # of each route
ADMIN = "the admin key of the test"
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
CHAT = {
    "model": "policy",
    "messages": [
        {"role": "user", "content": "2+2?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ],
    "max_completion_tokens": 2,
    "tools": [{"type": "function", "function": TOOL}],
    "stream": True,
}
HONEST = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": {
        "model": "policy",
        "instructions": "be kind",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "4"},
        ],
        "tools": [{"type": "function", **TOOL}],
        "max_output_tokens": 2,
        "stream": False,
    },
    "/v1/messages": {
        "model": "policy",
        "system": "be kind",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": "4"}],
            },
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "max_tokens": 2,
        "stop_sequences": ["x"],
        "stream": False,
    },
    "/v1/messages/count_tokens": {
        "model": "policy",
        "system": [{"type": "text", "text": "be kind"}],
        "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "2+2?"}],
        "tools": [{"name": "f"}, {"type": "web_search_20250305", "name": "w"}],
    },
    "/v1/completions": {"model": "policy", "prompt": "2+2?", "max_tokens": 2, "logprobs": 0},
    "/inference/v1/generate": {
        "token_ids": [5, 6],
        "sampling_params": {"max_tokens": 2, "temperature": 0.5, "logprobs": 0},
    },
    "/rl/set_reward": {"reward": 1.0, "interaction_id": "x"},
    "/rl/end_session": {"reward": 1.0},
    "/rl/start_session": {},
}


LENGTHS = {  # what bounds the answer
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
    "/v1/completions": "max_tokens",
}


@pytest.fixture(scope="module")
def proxy(world):
    async def start():
        proxy = AgentProxy(AgentConfig(mode="online"), admin_key=ADMIN)
        await proxy.start()
        return proxy

    proxy = world.runner.run(start()).result(300)
    yield proxy
    world.runner.run(proxy.stop()).result(300)


@pytest.fixture(scope="module")
def key_of_session(world, proxy):
    """The key of a session that is open: fuzzing ends them."""
    options = SessionOptions(
        AgentConfig(), world.tokenizer, GenerationHyperparameters(max_new_tokens=2)
    )

    async def open_one():
        session = Session(options, world.engine)
        proxy.admit(session)
        return session

    last = [world.runner.run(open_one()).result(300)]

    def key():
        if last[0].ended.is_set():
            last[0] = world.runner.run(open_one()).result(300)
        return last[0].key

    return key


@pytest.fixture(scope="module")
def client(proxy):
    with httpx.Client(base_url=url_of(proxy), timeout=900) as client:
        yield client


@pytest.mark.slow
def test_no_route_falls_over(proxy, client, key_of_session):
    def key_for(path):
        return ADMIN if path == "/rl/start_session" else key_of_session()

    def send(case):
        if is_allowed(case) and case.path in LENGTHS and isinstance(case.body, dict):
            case.body |= {"model": "policy", "n": 1, LENGTHS[case.path]: 2}
        http_fuzz.ask(case, url_of(proxy), key_for(case.path))

    @settings(max_examples=10 * NUM_EXAMPLES)
    @given(st.sampled_from(sorted(HONEST)), NOISE)
    def send_noise(path, noise):
        http_fuzz.send_noise(url_of(proxy) + path, key_for(path), noise)

    description = schemathesis.openapi.from_dict(create_app(proxy).openapi())
    http_fuzz.every_route(description, send, max_examples=NUM_EXAMPLES)
    send_noise()
    for path in LENGTHS:
        headers = {"authorization": f"Bearer {key_of_session()}"}
        answer = client.post(path, headers=headers, json=HONEST[path])
        assert answer.status_code == 200, answer.text


def test_any_body_is_answered(proxy, client, key_of_session):
    def send(path):
        @settings(max_examples=10 * NUM_EXAMPLES)
        @given(json_fuzz.bodies(HONEST[path]))
        def one(body):
            key = ADMIN if path == "/rl/start_session" else key_of_session()
            answer = client.post(path, headers=http_fuzz.bearer(key), content=body)
            http_fuzz.check(answer.status_code, answer.text, body)
            if answer.status_code >= 400:
                assert ("type" in answer.json()) == path.startswith("/v1/messages")

        one()

    for path in HONEST:
        send(path)


def url_of(proxy):
    return proxy.base_url.removesuffix("/v1")


@given(st.binary(max_size=60), st.sampled_from(sorted(HONEST)), st.booleans())
def test_only_a_key_opens(proxy, client, value, path, as_api_key):
    value = bytes(byte for byte in value if byte >= 32 and byte != 127).strip()
    header = b"x-api-key" if as_api_key else b"authorization"
    answer = client.post(path, headers=[(header, value)], content=b"{}")
    assert answer.status_code == 401
    http_fuzz.check(answer.status_code, answer.text, value)


@settings(max_examples=60)
@given(
    st.binary(max_size=200),
    st.sampled_from(
        [
            b"",
            b"GET / HTTP/1.1\r\n",
            b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999999999\r\n\r\n",
            b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"GET /v1/models HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ]
    ),
)
def test_bytes_that_are_no_request_leave_it_standing(proxy, client, content, begin):
    address = proxy.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=10) as connection:
        connection.sendall(begin + content)
    assert client.get("/v1/models").status_code == 401


def test_it_never_redirects(proxy, key_of_session):
    """A client that follows would hand its key to whomever the Host header names."""
    for target in (
        "/v1/models/",
        "//v1/models",
        "/rl/end_session/",
        "http://evil.example/v1/models/",
    ):
        for host in ("evil.example", "[", ""):
            fields = (
                f"Host: {host}\r\nAuthorization: Bearer {key_of_session()}\r\nConnection: close"
            )
            address = proxy.base_url.removeprefix("http://").removesuffix("/v1").split(":")
            with socket.create_connection((address[0], int(address[1])), timeout=900) as connection:
                connection.sendall(f"GET {target} HTTP/1.1\r\n{fields}\r\n\r\n".encode())
                answer = b"".join(iter(lambda: connection.recv(65536), b""))
            status = int(answer.split()[1])
            assert 400 <= status < 500 and b"location:" not in answer.lower(), (target, answer)


@pytest.mark.slow
def test_strangers_starve_no_agent(proxy, client, key_of_session):
    host, port = proxy.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    headers = {"authorization": f"Bearer {key_of_session()}"}
    with contextlib.ExitStack() as stack:
        strangers = []
        for number in range(600):
            stranger = stack.enter_context(socket.create_connection((host, int(port)), timeout=900))
            stranger.sendall(b"POST /v1/messages HTTP/1.1\r\n" if number % 2 else b"")
            strangers.append(stranger)
        for path in LENGTHS:
            answer = client.post(path, headers=headers, json=HONEST[path])
            assert answer.status_code == 200, answer.text
        assert all(map(http_fuzz.is_closed, strangers)), "each had 20 s"
