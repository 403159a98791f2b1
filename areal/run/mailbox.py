"""Requests to a living run, through its folder: what a command asks, and what the run answers.

    run                                          command, on any machine that sees the folder
    MailboxServer  writes  state.json        --> read_state: who listens, and that it is alive
                   takes   ID.request.json   <-- ask(folder, "join", address=...)
                   writes  ID.reply.json     --> its result, or ValueError / RuntimeError

The folder is private to its user, like the run's (paths.py): whoever may write there may do to the
run whatever its user may. A request of somebody else, or one that others could read, is refused.
`state.json` is written anew about every second; a reader that sees it unchanged for long knows that
the run is dead, whatever the clocks of two machines say.
"""

from __future__ import annotations

import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from areal.api.json_text import dumps, loads_object
from areal.utils import logging
from areal.utils.fs import atomic_write_text, private_folder, set_private
from areal.utils.threads import in_thread

logger = logging.getLogger("Mailbox")

_STATE = "state.json"
_REQUEST, _REPLY = ".request.json", ".reply.json"
_LOOK_S = 0.2
_BEAT_S = 1.0
_MAX_BYTES = 1 << 20
SILENCE_S = 30.0  # without a beat: the run is dead, or its machine is

Handler = Callable[[str, dict[str, Any]], dict[str, Any]]


class RunSilentError(RuntimeError):
    """No run listens there."""


class MailboxServer:
    """`handle(op, fields)` answers requests, each in a thread of its own; ValueError and
    RuntimeError reach who asked. `describe()` is what `state.json` says besides the beat."""

    def __init__(self, folder: Path, handle: Handler, describe: Callable[[], Mapping[str, Any]]):
        self._folder = folder
        self._handle = handle
        self._describe = describe
        self._run = secrets.token_hex(8)  # another after each start
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="mailbox", daemon=True)

    def start(self) -> None:
        set_private(private_folder(self._folder))
        for file in self._folder.iterdir():  # of a run that was killed: who asked will ask again
            if file.name.endswith((_REQUEST, _REPLY)):
                file.unlink(missing_ok=True)
        self._beat(0)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        (self._folder / _STATE).unlink(missing_ok=True)

    def _listen(self) -> None:
        beats, last = 0, 0.0
        while not self._ended.wait(_LOOK_S):
            try:
                for name in os.listdir(self._folder):
                    if name.endswith(_REQUEST):
                        self._take(self._folder / name)
                if time.monotonic() - last > _BEAT_S:
                    beats, last = beats + 1, time.monotonic()
                    self._beat(beats)
            except Exception as error:  # boundary: a full disk, a state that cannot be told now
                why = f"{type(error).__name__}: {error}"
                logger.warning("the mailbox %s cannot be used now: %s", self._folder, why)
                self._ended.wait(_BEAT_S)

    def _beat(self, number: int) -> None:
        state = {"run": self._run, "beat": number, **self._describe()}
        atomic_write_text(self._folder / _STATE, dumps(state), durable=False)

    def _take(self, file: Path) -> None:
        """Read and remove one request, and answer it in a thread."""
        try:
            request = loads_object(_read_own(file), file.name)
            fault = None if isinstance(request.get("op"), str) else "op: expected a text"
        except FileNotFoundError:  # who asked has gone
            return
        except (ValueError, OSError) as error:
            request, fault = {}, str(error)
        file.unlink(missing_ok=True)
        reply = file.with_name(file.name.removesuffix(_REQUEST) + _REPLY)
        if fault is not None:
            logger.warning("a request was refused: %s", fault)
            atomic_write_text(reply, dumps({"error": fault, "kind": "user"}), durable=False)
            return
        in_thread("mailbox-request", self._answer, request, reply)

    def _answer(self, request: dict[str, Any], reply: Path) -> None:
        try:
            answer = {"result": self._handle(request.pop("op"), request)}
        except ValueError as error:
            answer = {"error": str(error), "kind": "user"}
        except Exception as error:  # boundary: a request never ends the run
            logger.warning("a request failed: %s: %s", type(error).__name__, error)
            answer = {"error": str(error) or type(error).__name__, "kind": "run"}
        with suppress(OSError):  # the folder is gone with the run, or the disk is full
            atomic_write_text(reply, dumps(answer), durable=False)


def read_state(folder: Path) -> dict[str, Any]:
    """RunSilentError if no run listens; `wait_for_beat` says whether one that did is alive."""
    try:
        return loads_object(_read_own(folder / _STATE), _STATE)
    except FileNotFoundError:
        raise RunSilentError(
            f"{folder.parent}: no run listens there: it has ended, has not begun to train, or "
            "generates in its own process or in turns with training"
        ) from None


def last_sign(folder: Path) -> float:
    """Unix time of the newest beat, by the clock of who keeps the folder. FileNotFoundError if
    there was none."""
    return (folder / _STATE).stat().st_mtime


def ask(
    folder: Path, op: str, *, is_wanted: Callable[[], bool] = lambda: True, **fields: Any
) -> dict[str, Any]:
    """The result of a living run. ValueError if it refuses, RuntimeError if it cannot do it,
    RunSilentError if it is dead, was started again, or `is_wanted` has become false."""
    state = read_state(folder)
    name = secrets.token_hex(16)
    request, reply = folder / f"{name}{_REQUEST}", folder / f"{name}{_REPLY}"
    atomic_write_text(request, dumps({"op": op, **fields}), durable=False)
    try:
        answer = _wait_for(reply, folder, state, is_wanted)
    finally:
        request.unlink(missing_ok=True)
        reply.unlink(missing_ok=True)
    if "error" in answer:
        raise (ValueError if answer.get("kind") == "user" else RuntimeError)(answer["error"])
    return answer["result"]


def _wait_for(
    reply: Path, folder: Path, state: Mapping[str, Any], is_wanted: Callable[[], bool]
) -> dict[str, Any]:
    deadline = time.monotonic() + SILENCE_S
    while True:
        with suppress(FileNotFoundError):
            return loads_object(_read_own(reply), reply.name)
        found = read_state(folder)
        if found["run"] != state["run"]:
            raise RunSilentError(f"{folder.parent}: the run was started again meanwhile")
        if found["beat"] != state["beat"]:
            state, deadline = found, time.monotonic() + SILENCE_S
        if time.monotonic() > deadline:
            raise RunSilentError(f"{folder.parent}: the run gave no sign for {SILENCE_S:g} s")
        if not is_wanted():
            raise RunSilentError(f"{folder.parent}: nobody waits for the answer any more")
        time.sleep(_LOOK_S)


def _read_own(file: Path) -> bytes:
    """The contents of a small private file of this user. ValueError for any other."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise ValueError(f"{file}: expected a file of user {os.getuid()}")
        if status.st_mode & 0o077:
            raise ValueError(f"{file}: others may read or write it; expected mode 0600")
        if status.st_size > _MAX_BYTES:
            raise ValueError(f"{file}: {status.st_size} bytes, expected at most {_MAX_BYTES}")
        return os.read(descriptor, _MAX_BYTES)
    finally:
        os.close(descriptor)
