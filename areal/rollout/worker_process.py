"""Rollout worker process: runs groups on its own event loop.

    controller -> worker   frames of pickle: the set-up, then ("open", stream, main, bytes) and
                           ("run", call, stream, task id, row)
    worker -> controller   frames of (JSON, safetensors): {"ready"}, {"call", "attempt_failed"},
                           {"call", "state": "done" | "rejected" | "failed", ...} + trajectory

The controller (`workers.py`) starts it; it ends when the socket closes, or by the parent-death
signal. It keeps no state that matters: if it is killed, its groups run elsewhere. Pickle travels
only from the controller, which the worker trusts anyway; replies are data only.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import struct
import sys
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from areal.rollout.failures import kind_of
from areal.rollout.group import GroupRunner
from areal.rollout.trajectory import encode
from areal.sandbox.worker import adopt_main
from areal.utils import import_path, stacks, stats_tracker
from areal.utils.garbage import tune_gc

DOWN = struct.Struct("<Q")  # bytes of pickle
UP = struct.Struct("<II")  # bytes of JSON, of safetensors

_call: ContextVar[int] = ContextVar("rollout_call")  # call id of the running group


@dataclass(frozen=True, slots=True)
class WorkflowRecipe:
    """How to build a workflow where it will run: a function's import path and its arguments."""

    factory: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        return import_path.load(self.factory, key="workflow")(**self.kwargs)


def main(fd: int) -> None:
    stacks.listen()
    os.dup2(2, 1)  # output of a workflow goes to the log
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    asyncio.run(_serve(channel))


async def _serve(channel: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    setup = await _next_frame(reader)
    if setup is None:
        return
    sys.path[:] = setup["sys_path"]
    worker = _Worker(pickle.loads(setup["engine"]), writer)
    tune_gc()
    try:
        while (message := await _next_frame(reader)) is not None:
            kind, *arguments = message
            {"open": worker.open, "run": worker.run}[kind](*arguments)
    finally:
        await worker.close()


async def _next_frame(reader: asyncio.StreamReader) -> Any:
    """The next message of the controller; None when the connection is closed."""
    try:
        (size,) = DOWN.unpack(await reader.readexactly(DOWN.size))
        return pickle.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class _Worker:
    def __init__(self, engine: Any, writer: asyncio.StreamWriter) -> None:
        self._engine = engine
        self._writer = writer
        self._streams: dict[int, GroupRunner | Exception] = {}
        self._groups: set[asyncio.Task[None]] = set()
        engine.initialize()
        self._send({"ready": True})

    def open(self, stream: int, main: tuple[str, str] | None, spec: bytes) -> None:
        """If a stream cannot be opened, each of its groups fails with that error."""
        try:
            if main is not None:
                adopt_main(*main)
            options = pickle.loads(spec)
            self._streams[stream] = GroupRunner(
                engine=self._engine,
                workflow=options.pop("recipe").build(),
                on_attempt_failed=self._tell_attempt_failed,
                **options,
            )
        except Exception as error:
            self._streams[stream] = error

    def run(self, call: int, stream: int, task_id: int, row: dict[str, Any]) -> None:
        task = asyncio.create_task(self._run(call, stream, task_id, row), name=f"task-{task_id}")
        self._groups.add(task)
        task.add_done_callback(self._groups.discard)

    async def close(self) -> None:
        for task in self._groups:
            task.cancel()
        await asyncio.gather(*self._groups, return_exceptions=True)
        for groups in self._streams.values():
            if isinstance(groups, GroupRunner):
                groups.workflow.close()
        self._engine.destroy()

    async def _run(self, call: int, stream: int, task_id: int, row: dict[str, Any]) -> None:
        """Boundary: an exception becomes a message."""
        _call.set(call)
        answer: dict[str, Any] = {"call": call}
        payload = b""
        try:
            groups = self._streams[stream]
            if isinstance(groups, Exception):
                raise groups
            trajectory = await groups.run(task_id, row)
            answer["state"] = "rejected" if trajectory is None else "done"
            payload = b"" if trajectory is None else encode(trajectory)
        except Exception as error:
            answer |= {"state": "failed", "kind": kind_of(error), "text": str(error)}
        told = {"stats": stats_tracker.take_all(), "counts": self._engine.take_counts()}
        self._send(answer | told, payload)

    def _tell_attempt_failed(self, error: Exception, retried: bool) -> None:
        failed = {"attempt_failed": kind_of(error), "text": str(error), "retried": retried}
        self._send({"call": _call.get(), **failed})

    def _send(self, message: dict[str, Any], payload: bytes = b"") -> None:
        header = json.dumps(message).encode()
        self._writer.write(UP.pack(len(header), len(payload)) + header + payload)


if __name__ == "__main__":
    main(int(sys.argv[1]))
