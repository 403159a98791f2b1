"""RpcProcess: a child that answers JSON-RPC 2.0 requests, one JSON text per line of its pipes.

    process = await RpcProcess.start([python, "bridge.py"], name="reasoning-gym", env=environ)
    result = await process.call("reset", {"row": row})
    await process.close()

Hubs and MCP servers on pipes speak it. The child is foreign: a line has at most MAX_LINE_BYTES, a
line that is no JSON is logged and skipped, and so is a reply to nothing we asked (a late one, or a
wrong id). Whoever calls sets the deadline. When the child ends or breaks the protocol, every open
and later call is an EnvError with its exit code and last lines of stderr.

Belongs to the event loop it was started on; only `kill` may be called from elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from areal.api.json_text import JsonError, loads
from areal.api.redact import hide_secrets
from areal.environments.interface import EnvError
from areal.utils import logging
from areal.utils.child_process import describe_exit, spawn

logger = logging.getLogger("Environment")

MAX_LINE_BYTES = 8 << 20
_STDERR_BYTES = 4000  # of the last output, for errors
_CLOSE_S = 5.0  # for a child to end by itself once its input is closed
METHOD_NOT_FOUND = -32601


class RpcError(Exception):
    """The peer answered a request with an error."""

    def __init__(self, error: Any) -> None:
        found = error if isinstance(error, dict) else {"message": error}
        self.code = found.get("code")
        super().__init__(str(found.get("message"))[:2000])


class RpcProcess:
    """Made by `start`."""

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        self.name = name
        self._process = process
        self._ids = itertools.count(1)
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._stderr: deque[bytes] = deque()
        self._failure: EnvError | None = None  # why there are no more answers
        self._writer: asyncio.StreamWriter
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls, argv: Sequence[str], *, name: str, env: Mapping[str, str], cwd: str | None = None
    ) -> RpcProcess:
        """EnvError if there is no such program."""
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        try:
            # In a thread: forking a large process takes a while.
            process = await asyncio.to_thread(spawn, argv, env, cwd=cwd, **pipes)
        except OSError as error:
            raise EnvError(f"{name}: cannot start {argv[0]!r}: {error}") from error
        self = cls(process, name)
        await self._connect()
        return self

    @property
    def has_ended(self) -> bool:
        return self._failure is not None

    async def call(self, method: str, params: Mapping[str, Any]) -> Any:
        """The result; RpcError if the answer is an error, EnvError if there can be none."""
        number = next(self._ids)
        reply = asyncio.get_running_loop().create_future()
        self._open[number] = reply
        try:
            await self._send({"id": number, "method": method, "params": params})
            return await reply
        finally:
            del self._open[number]

    async def notify(self, method: str) -> None:
        await self._send({"method": method})

    async def close(self) -> None:
        """Closing its input asks it to end; what is left is killed."""
        self._writer.close()
        await asyncio.wait(self._tasks, timeout=_CLOSE_S)
        self.kill()
        await asyncio.wait(self._tasks, timeout=_CLOSE_S)

    def kill(self) -> None:
        """With all processes of its group. Thread-safe."""
        # Only while the leader is unreaped is its id certain to be that of our group.
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        streams = []
        for pipe, limit in ((self._process.stdout, MAX_LINE_BYTES), (self._process.stderr, 1024)):
            stream = asyncio.StreamReader(limit=limit)
            await loop.connect_read_pipe(
                lambda stream=stream: asyncio.StreamReaderProtocol(stream), pipe
            )
            streams.append(stream)
        transport, protocol = await loop.connect_write_pipe(
            lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), self._process.stdin
        )
        self._writer = asyncio.StreamWriter(transport, protocol, None, loop)
        stderr = asyncio.create_task(self._keep_stderr(streams[1]))
        self._tasks = [stderr, asyncio.create_task(self._read(streams[0], stderr))]

    async def _send(self, message: dict[str, Any]) -> None:
        if self._failure is not None:
            raise EnvError(str(self._failure))
        line = json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"
        try:
            self._writer.write(line)
            await self._writer.drain()
        except (ConnectionError, RuntimeError) as error:  # it is ending; `_read` says how
            if asyncio.current_task() not in self._tasks:  # `_read` answers the peer, too
                await asyncio.wait(self._tasks)
            raise EnvError(str(self._failure or error)) from error

    async def _read(self, stdout: asyncio.StreamReader, stderr: asyncio.Task[None]) -> None:
        why = ""
        try:
            while True:
                line = await stdout.readuntil(b"\n")
                await self._take(line)
        except asyncio.LimitOverrunError:
            why = f"wrote a line of more than {MAX_LINE_BYTES >> 20} MiB"
        except (asyncio.IncompleteReadError, ConnectionError, EnvError):
            pass  # it closed its output
        if not why:
            await self._wait_end()  # by itself, for its exit code
        self.kill()
        code = await asyncio.to_thread(self._process.wait)
        await asyncio.wait([stderr], timeout=_CLOSE_S)
        said = hide_secrets(b"".join(self._stderr).decode(errors="replace").strip())
        tail = f"; its last output:\n{said}" if said else "; it wrote nothing to stderr"
        self._failure = EnvError(f"{self.name} {why or describe_exit(code)}{tail}")
        self._writer.close()
        for reply in self._open.values():
            if not reply.done():
                reply.set_exception(EnvError(str(self._failure)))

    async def _wait_end(self) -> None:
        for _ in range(100):
            if self._process.poll() is not None:
                return
            await asyncio.sleep(_CLOSE_S / 100)

    async def _take(self, line: bytes) -> None:
        message = parsed(line)
        if message is None:
            if line.strip():
                logger.warning("%s wrote a line that is no message: %r", self.name, line[:200])
            return
        if "method" in message:
            if "id" in message:
                await self._send(answer_to(message))
            return
        number = message.get("id")
        reply = self._open.get(number) if isinstance(number, int) else None
        if reply is None or reply.done():
            logger.warning("%s answered a request that is not open: id %r", self.name, number)
        elif "error" in message:
            reply.set_exception(RpcError(message["error"]))
        else:
            reply.set_result(message.get("result"))

    async def _keep_stderr(self, stderr: asyncio.StreamReader) -> None:
        size = 0
        while data := await stderr.read(_STDERR_BYTES):
            self._stderr.append(data)
            size += len(data)
            while size - len(self._stderr[0]) >= _STDERR_BYTES:
                size -= len(self._stderr.popleft())


def parsed(text: bytes | str) -> dict[str, Any] | None:
    """The message in `text`, None if it is none (see `json_text.loads` for what is JSON)."""
    try:
        message = loads(text)
    except JsonError:
        return None
    return message if isinstance(message, dict) else None


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """What we say when the peer asks: we are there, and offer nothing."""
    if request["method"] == "ping":
        return {"id": request["id"], "result": {}}
    error = {"code": METHOD_NOT_FOUND, "message": "this client offers no such method"}
    return {"id": request["id"], "error": error}
