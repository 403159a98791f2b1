"""Connections to our servers: those without a key cannot keep those with one out.

Real sockets against a real uvicorn, with limits small enough to wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import http_fuzz
import pytest
import requests
import uvicorn
from fastapi import Request
from starlette.exceptions import HTTPException

from areal.utils.http_server import ConnectionLimits, new_app, read_body, server_config, trust

KEY = {"Authorization": "Bearer key"}
QUICK = ConnectionLimits(request_s=0.5, min_rate=1 << 20, max_strangers=50)
CLOSED_S = 30  # by when a connection is closed, on however busy a machine


def echo_app():
    app = new_app()

    def check(request: Request) -> None:
        if request.headers.get("authorization") != KEY["Authorization"]:
            raise HTTPException(401)
        trust(request.scope)

    @app.post("/echo")
    async def echo(request: Request) -> dict[str, int]:
        check(request)
        return {"size": len(await read_body(request))}

    @app.get("/slow")
    async def slow(request: Request) -> dict[str, str]:
        check(request)
        await asyncio.sleep(2.5)
        return {"text": "\ud83d"}

    @app.get("/block")
    async def block(request: Request) -> dict[str, bool]:
        check(request)
        time.sleep(8)  # the event loop stands
        return {"blocked": True}

    return app


@contextlib.contextmanager
def served(limits=QUICK, keep_alive_s=60):
    server = uvicorn.Server(server_config(echo_app(), keep_alive_s=keep_alive_s, limits=limits))
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    listener.listen(1024)
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join(300)
        listener.close()


def connect(address) -> socket.socket:
    return socket.create_connection(address, timeout=CLOSED_S)


def reply(connection) -> bytes:
    """Headers and a body of JSON, however they are cut."""
    content = b""
    while not content.endswith(b"}"):
        content += (piece := connection.recv(65536))
        assert piece, content
    return content


def echo(address, size=3, session=requests):
    url = f"http://{address[0]}:{address[1]}/echo"
    answer = session.post(url, headers=KEY, data=b"x" * size, timeout=CLOSED_S)
    return answer.status_code, answer.json()


def head(size: int, key: str = "key") -> bytes:
    fields = f"Host: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {size}"
    return f"POST /echo HTTP/1.1\r\n{fields}\r\n\r\n".encode()


@pytest.mark.parametrize(
    "begin",
    [b"", b"POST /ec", head(10)[:-4], head(10), head(10, "wrong"), head(3, "wrong") + b"abc"],
    ids=["nothing", "line", "headers", "body", "stranger's body", "stranger at rest"],
)
def test_who_does_not_finish_a_request_is_closed(begin):
    with served() as address, connect(address) as connection:
        connection.sendall(begin)
        assert http_fuzz.is_closed(connection)
        assert echo(address) == (200, {"size": 3})


@pytest.mark.parametrize("begin", [b"", head(10_000), head(10_000, "wrong")])
def test_a_byte_at_a_time_is_no_request(begin):
    with served() as address, connect(address) as connection:
        connection.sendall(begin)
        until = time.monotonic() + CLOSED_S
        with pytest.raises(ConnectionError):
            while time.monotonic() < until:
                connection.sendall(b"x")
                time.sleep(0.05)
        assert echo(address) == (200, {"size": 3})


def test_a_key_gets_in_among_hundreds_without():
    """More connections than may stay, idle ones and slow writers, again and again."""
    limits = ConnectionLimits(request_s=20, max_strangers=50)
    with served(limits) as address, contextlib.ExitStack() as stack, requests.Session() as kept:
        assert echo(address, session=kept) == (200, {"size": 3})
        for begin in (b"", b"GET / HTTP/1.1\r\nHost:", head(10**9, "wrong")):
            for _ in range(200):
                stranger = stack.enter_context(connect(address))
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(begin)
            assert echo(address) == (200, {"size": 3})
            assert echo(address, session=kept) == (200, {"size": 3})
        first = stack.enter_context(connect(address))
        for _ in range(51):
            stack.enter_context(connect(address))
        assert http_fuzz.is_closed(first), "the oldest goes"


def test_who_has_shown_a_key_may_rest_and_wait():
    with served() as address:
        connection = http.client.HTTPConnection(*address, timeout=CLOSED_S)
        connection.connect()
        own = connection.sock
        for method, path, answer in (
            ("POST", "/echo", b'{"size":3}'),
            ("GET", "/slow", '{"text":"\ufffd"}'.encode()),
            ("POST", "/echo", b'{"size":3}'),
        ):
            connection.request(method, path, b"abc" if method == "POST" else None, KEY)
            assert connection.getresponse().read() == answer
            time.sleep(2.5)  # several sweeps
        assert connection.sock is own
        connection.close()


def test_a_large_body_has_the_time_it_takes():
    limits = ConnectionLimits(request_s=0.5, min_rate=1 << 10)
    with served(limits) as address, connect(address) as connection:
        connection.sendall(head(20 << 10))
        for _ in range(20):
            connection.sendall(b"x" * 1024)
            time.sleep(0.1)
        assert b'{"size":20480}' in reply(connection)


def test_nobody_is_blamed_for_a_blocked_event_loop():
    with served(ConnectionLimits(request_s=5)) as address:
        url = f"http://{address[0]}:{address[1]}/block"
        blocking = threading.Thread(
            target=requests.get, args=[url], kwargs={"headers": KEY, "timeout": CLOSED_S}
        )
        with connect(address) as connection:
            connection.sendall(head(3))
            time.sleep(0.1)
            blocking.start()
            time.sleep(1)
            connection.sendall(b"abc")
            assert b'{"size":3}' in reply(connection)
        blocking.join(CLOSED_S)


def test_a_body_too_large_is_refused():
    with served() as address, connect(address) as connection:
        connection.sendall(head(1 << 30))
        with contextlib.suppress(ConnectionError):
            for _ in range(300):
                connection.sendall(b"x" * (1 << 20))
        assert b"413" in reply(connection)


def test_a_server_raises_its_file_limit():
    code = (
        "import resource\n"
        "from areal.utils.http_server import new_app, server_config\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))\n"
        "server_config(new_app(), keep_alive_s=5)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert done.stdout.strip() == "(4096, 4096)", done.stderr


def test_connections_leave_files_to_others(tmp_path):
    """With few descriptors, a flood of strangers leaves the process some to open, and no log."""
    code = f"""
import resource, socket, sys, threading, time
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
from test_http_server import ConnectionLimits, served
with served(ConnectionLimits()) as address:
    print(address[1], flush=True)
    sys.stdin.read(1)
    files = [open("/dev/null") for _ in range(20)]
    print("opened", flush=True)
"""
    log = tmp_path / "log"
    with log.open("w") as errors:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        child = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
    try:
        address = ("127.0.0.1", int(child.stdout.readline()))
        with contextlib.ExitStack() as stack:
            for _ in range(400):
                stack.enter_context(connect(address))
            assert echo(address) == (200, {"size": 3})
            child.stdin.write("x")
            child.stdin.flush()
            assert child.stdout.readline() == "opened\n"
    finally:
        child.stdin.close()
        child.wait(300)
        child.stdout.close()
    assert "Too many open files" not in log.read_text()
