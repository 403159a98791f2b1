"""The parent's handle on one reward worker: its process, its socket, what was sent to it.

`pool` decides what is sent and when; this file starts and kills the process, cuts its replies
into messages and refuses what is not one. `describe_function` makes the first frame, from which
the worker loads the user's function.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from areal.api.config.limits import ProcessLimits
from areal.api.scratch import remove_tree
from areal.sandbox import worker
from areal.sandbox.cgroup import Group, open_group
from areal.sandbox.environment import hidden_paths, reward_environment
from areal.sandbox.output import printable
from areal.sandbox.watch import is_alive
from areal.utils.stacks import descendants

MAX_REPLY_BYTES = 1 << 20
MAX_TEXT_CHARS = 10_000
_KILL_ROUNDS = 100
_ENDING_S = 0.2  # from the end of a process's files to that of the process


class BadReplyError(Exception):
    """A worker wrote something that is not a reply: user code reached the socket."""


class RewardProcess:
    """One child process, the folder it may write in, and what was sent to it.

    `place` is a private folder, in which it gets its own.
    """

    def __init__(self, now: float, limits: ProcessLimits | None, place: Path) -> None:
        self.folder = tempfile.mkdtemp(dir=place)
        self.process, self.channel, self.printed = _spawn(limits, self.folder)
        self.group = _group_of(self.process.pid, limits)
        self.output = self.printed.fileno()  # what it prints
        self.busy_since = now  # loop time when it began what it does now
        self.ready = False  # the function is loaded
        self.in_flight: deque[Any] = deque()  # the first one is running
        self.outgoing = bytearray()
        self.watching_writes = False
        self.timer: asyncio.TimerHandle | None = None
        self.watched: tuple[int, float] | None = None  # (call, CPU time) when last looked at
        self._incoming = b""

    def split_messages(self, data: bytes) -> list[dict[str, Any]]:
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        if len(self._incoming) > MAX_REPLY_BYTES:
            raise BadReplyError(f"sent a reply longer than {MAX_REPLY_BYTES} bytes")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise BadReplyError(f"sent a reply that is not JSON: {error}") from error
        if not all(isinstance(message, dict) for message in messages):
            raise BadReplyError("sent a reply that is not a JSON object")
        return [{key: _printable(value) for key, value in one.items()} for one in messages]

    def cpu_of_call(self, cpu_s: float) -> float:
        """CPU time since the running call was first seen, of `cpu_s` in all; 0 while it loads."""
        call = self.in_flight[0].id if self.in_flight else 0
        if self.watched is None or self.watched[0] != call or not self.ready:
            self.watched = (call, cpu_s)
        return cpu_s - self.watched[1]

    def wait_end(self) -> int | None:
        """How a process that closed its files has ended; None when it has not."""
        try:
            return self.process.wait(timeout=_ENDING_S)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """SIGKILL to it and to whatever it started, in whichever session that is now."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # Stopped first: orphans become its children (it is their reaper) and are found.
                os.killpg(self.process.pid, signal.SIGSTOP)
                _kill_descendants(self.process.pid)
                os.killpg(self.process.pid, signal.SIGKILL)
        if self.group is not None:
            self.group.kill()

    def clean_up(self) -> None:
        """When the process is gone: what it wrote goes too."""
        if self.group is not None:
            self.group.close()
        with contextlib.suppress(OSError):  # what is left goes with the folder around it
            remove_tree(self.folder)


def _printable(value: Any) -> Any:
    """Nothing a worker says reaches a log, the database or a terminal unless they can take it."""
    return printable(value, MAX_TEXT_CHARS) if isinstance(value, str) else value


def _spawn(
    limits: ProcessLimits | None, folder: str
) -> tuple[subprocess.Popen[bytes], socket.socket, IO[bytes]]:
    """A fresh interpreter that knows only `worker`, our end of its socket, its output."""
    options = None if limits is None else {**asdict(limits), "hidden": hidden_paths(limits)}
    argv = [sys.executable, "-P", worker.__file__]
    parent_end, child_end = socket.socketpair()
    parent_end.setblocking(False)
    with child_end:
        try:
            process = subprocess.Popen(
                [*argv, str(child_end.fileno()), json.dumps(options), folder],
                env=reward_environment(limits, folder),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # never mixed with the run's own output
                stderr=subprocess.STDOUT,
                pass_fds=[child_end.fileno()],
                start_new_session=True,  # Ctrl-C is for the run, not for its rewards
            )
        except OSError:
            parent_end.close()
            raise
    assert process.stdout is not None  # a pipe
    os.set_blocking(process.stdout.fileno(), False)
    return process, parent_end, process.stdout


def _group_of(pid: int, limits: ProcessLimits | None) -> Group | None:
    """The process's control group; it waits for its first frame, so it is in before any code."""
    group = None if limits is None or sys.platform != "linux" else open_group(limits)
    if group is not None:
        try:
            group.add(pid)
        except OSError:
            group.close()
            return None
    return group


def _kill_descendants(pid: int) -> None:
    """Linux tells who they are; elsewhere the group has to do."""
    for _ in range(_KILL_ROUNDS):  # those that were forked meanwhile are found in the next
        found = [child for child in descendants(pid) if is_alive(child)]
        for child in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        if not found:
            return


def frame(call_id: int, payload: bytes) -> bytes:
    return worker.FRAME_HEADER.pack(len(payload), call_id) + payload


def describe_function(reward_fn: Callable[..., float] | str) -> tuple[str, bytes]:
    """(name for messages, set-up frame from which a worker loads the function)."""
    if os.environ.get(worker.IN_WORKER) == str(os.getpid()):
        raise RuntimeError(
            "a reward worker imported a script that starts training when imported; put the "
            "script's last part under `if __name__ == '__main__':`"
        )
    setup: dict[str, Any] = {"sys_path": [entry or os.getcwd() for entry in sys.path], "main": None}
    if isinstance(reward_fn, str):
        if "." not in reward_fn:
            raise ValueError(f"reward_fn: expected 'package.module.function', got {reward_fn!r}")
        return printable(reward_fn), pickle.dumps({**setup, "path": reward_fn})
    name = printable(getattr(reward_fn, "__qualname__", None) or repr(reward_fn), 200)
    try:
        blob = pickle.dumps(reward_fn)
    except Exception as error:
        raise ValueError(
            f"reward_fn: {name} cannot be sent to a reward worker ({error}); define it at the top "
            "level of a module, not inside a function or as a lambda"
        ) from error
    if b"__main__" in blob:
        setup["main"] = main_module(name)
    return name, pickle.dumps({**setup, "path": None, "pickle": blob})


def main_module(name: str) -> tuple[str, str]:
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return "module", spec.name
    if (file := getattr(main, "__file__", None)) is None:
        raise ValueError(f"reward_fn: {name} was typed into a session; move it to a file")
    return "path", str(Path(file).absolute())
