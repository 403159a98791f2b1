"""The parent's handle on one reward worker: its process, its socket, what was sent to it.

`reward_api` decides what is sent and when; this file starts and kills the process, cuts its replies
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
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from areal.api import reward_worker
from areal.api.config.limits import ProcessLimits
from areal.api.scratch import ScratchFolder
from areal.api.secret_text import is_secret

MAX_REPLY_BYTES = 1 << 20
_KILL_ROUNDS = 100


class BadReplyError(Exception):
    """A worker wrote something that is not a reply: user code reached the socket."""


class RewardProcess:
    """One child process, the folder it may write in, and what was sent to it."""

    def __init__(self, now: float, limits: ProcessLimits | None) -> None:
        self._scratch = ScratchFolder("reward")
        try:
            self.process, self.channel = _spawn(limits, str(self._scratch.path))
        except OSError:
            self.forget_folder()
            raise
        self.busy_since = now  # loop time when it began what it does now
        self.ready = False  # the function is loaded
        self.in_flight: deque[Any] = deque()  # the first one is running
        self.outgoing = bytearray()
        self.watching_writes = False
        self.timer: asyncio.TimerHandle | None = None
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
        return messages

    def kill(self) -> None:
        """SIGKILL to it and to whatever it started, in whichever session that is now."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # Stopped first: orphans become its children (it is their reaper) and are found.
                os.killpg(self.process.pid, signal.SIGSTOP)
                _kill_descendants(self.process.pid)
                os.killpg(self.process.pid, signal.SIGKILL)

    def forget_folder(self) -> None:
        """When the process is gone: what it wrote goes too."""
        self._scratch.close()


def _spawn(limits: ProcessLimits | None, folder: str) -> tuple[subprocess.Popen, socket.socket]:
    """A fresh interpreter that knows only `reward_worker`, and our end of its socket."""
    options = json.dumps(None if limits is None else asdict(limits))
    argv = [sys.executable, "-P", reward_worker.__file__]
    parent_end, child_end = socket.socketpair()
    parent_end.setblocking(False)
    with child_end:
        try:
            process = subprocess.Popen(
                [*argv, str(child_end.fileno()), options, folder],
                env=_environment(limits, folder),
                stdin=subprocess.DEVNULL,
                pass_fds=[child_end.fileno()],
                start_new_session=True,  # Ctrl-C is for the run, not for its rewards
            )
        except OSError:
            parent_end.close()
            raise
    return process, parent_end


def _kill_descendants(pid: int) -> None:
    """Linux tells who they are; elsewhere the group has to do."""
    for _ in range(_KILL_ROUNDS):  # those that were forked meanwhile are found in the next
        found = [child for child in _descendants(pid) if _is_alive(child)]
        for child in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        if not found:
            return


def _descendants(pid: int) -> Iterator[int]:
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has just ended
            for child in map(int, file.read_text().split()):
                yield child
                yield from _descendants(child)


def _is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def _environment(limits: ProcessLimits | None, folder: str) -> dict[str, str]:
    """Ours without its secrets; a process without limits loses only those of areal."""
    kept = set() if limits is None else set(limits.env)
    return {
        name: value
        for name, value in os.environ.items()
        if name in kept
        or not is_secret(name, value)
        or (limits is None and not name.startswith("AREAL_"))
    } | {"TMPDIR": folder}


def frame(call_id: int, payload: bytes) -> bytes:
    return reward_worker.FRAME_HEADER.pack(len(payload), call_id) + payload


def describe_function(reward_fn: Callable[..., float] | str) -> tuple[str, bytes]:
    """(name for messages, set-up frame from which a worker loads the function)."""
    if os.environ.get(reward_worker.IN_WORKER) == str(os.getpid()):
        raise RuntimeError(
            "a reward worker imported a script that starts training when imported; put the "
            "script's last part under `if __name__ == '__main__':`"
        )
    setup = {"sys_path": [entry or os.getcwd() for entry in sys.path], "main": None}
    if isinstance(reward_fn, str):
        if "." not in reward_fn:
            raise ValueError(f"reward_fn: expected 'package.module.function', got {reward_fn!r}")
        return reward_fn, pickle.dumps({**setup, "path": reward_fn})
    name = getattr(reward_fn, "__qualname__", repr(reward_fn))
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
    if getattr(main, "__spec__", None) is not None:
        return "module", main.__spec__.name
    if getattr(main, "__file__", None) is None:
        raise ValueError(f"reward_fn: {name} was typed into a session; move it to a file")
    return "path", str(Path(main.__file__).absolute())
