"""Watchdog: ends a run without progress, and reports what each process waits for.

    with watched(300, stacks_file=logs / "stacks.txt") as watchdog:
        watchdog.observe("server", engine.progress)   # a changed return value is progress
        ...

Progress is any call of `waits.progress()`: an episode ended, a phase began, a micro-batch was
computed. After `seconds` without progress, outside of `waits.allowed`, the waits of this process go
to the log, the stacks of all its processes to a file, the cause to the last line of standard error;
then the process exits at once with code 1, whatever its threads are doing, and is not restarted.
Its children end with it (utils/child_process.py), and its files are as intact as after `kill -9`.

    watcher process   (run/watcher.py) decides; it also detects a process that holds the GIL
    watchdog thread   waits for: its requests       unblocked by: its end, close()
    observer threads  wait for: what they observe; one that hangs only reports no progress
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from areal.api.redact import hide_secrets
from areal.run import restart
from areal.run.watcher import Watched
from areal.utils import logging, stacks, waits
from areal.utils.channel import Channel
from areal.utils.child_process import describe_exit, module_argv, spawn

logger = logging.getLogger("Watchdog")

_MAX_POLL_S = 5.0
_MAX_WAITS = 200

_active: Watchdog | None = None


@contextlib.contextmanager
def watched(seconds: float | None, *, stacks_file: Path) -> Iterator[Watchdog]:
    """The watchdog of this process during the block; a nested block gets the outer one.

    This process, and those it starts meanwhile, write their stacks to `stacks_file` on request.
    """
    global _active
    if _active is not None:
        yield _active
        return
    with stacks.shared(stacks_file):
        _active = Watchdog(seconds, stacks_file)
        try:
            yield _active
        finally:
            _active.close()
            _active = None


class Watchdog:
    """With `seconds` None it never ends the run."""

    def __init__(self, seconds: float | None, stacks_file: Path) -> None:
        self._seconds = seconds
        self._stacks_file = stacks_file
        self._closing = threading.Event()
        if seconds is not None:
            self._clock = waits.share_clock()
            self._watcher = self._start_watcher(seconds)
            self._run("watchdog", self._serve, seconds)

    def observe(self, name: str, look: Callable[[], object]) -> None:
        """Call `look` every few seconds in a thread."""
        if self._seconds is not None:
            poll_s = min(_MAX_POLL_S, self._seconds / 10)
            self._run(f"watchdog-{name}", self._look, look, poll_s)

    def close(self) -> None:
        self._closing.set()
        if self._seconds is not None:
            self._channel.close()

    def _run(self, name: str, function: Callable[..., None], *args: object) -> None:
        threading.Thread(target=function, args=args, name=name, daemon=True).start()

    def _start_watcher(self, seconds: float) -> subprocess.Popen:
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        pipe = restart.pipe()
        run = Watched(
            pid=os.getpid(),
            seconds=seconds,
            stacks=str(self._stacks_file.absolute()),
            clock_fd=self._clock.fileno(),
            channel_fd=theirs.fileno(),
            restart_fd=pipe,
        )
        with theirs:
            return spawn(
                module_argv("areal.run.watcher", run.to_json()),
                os.environ,
                stdout=subprocess.DEVNULL,
                pass_fds=[run.clock_fd, run.channel_fd, *([] if pipe is None else [pipe])],
            )

    def _serve(self, seconds: float) -> None:
        """Answer the watcher's requests; restart it if it is killed."""
        while True:
            with contextlib.suppress(OSError, EOFError):
                self._answer()
            code = self._watcher.wait()
            if self._closing.wait(1.0):
                return
            logger.warning("the watchdog process %s: starting a new one", describe_exit(code))
            self._watcher = self._start_watcher(seconds)

    def _answer(self) -> NoReturn:
        while True:
            (received,) = self._channel.receive()
            question = json.loads(received)
            if question["ask"] == "end":
                _end(question["line"])
            found = waits.describe()[:_MAX_WAITS] or ["no thread waits: a computation hangs"]
            found = [hide_secrets(line) for line in found]
            answer = {"waits": found, "quiet_s": waits.quiet_s()}
            self._channel.send(json.dumps(answer).encode())

    def _look(self, look: Callable[[], object], poll_s: float) -> None:
        seen: object = None
        while not self._closing.wait(poll_s):
            try:
                now = look()
            except Exception as error:  # its owner gets this error too, and handles it
                logger.debug("progress could not be read: %s", error)
                continue
            if now != seen:
                seen = now
                waits.progress()


def _end(line: str) -> NoReturn:
    with contextlib.suppress(Exception):  # nothing may prevent the exit
        logger.error("nothing moves:\n%s", "\n".join(waits.describe()))
        restart.forbid_restart()
        sys.stdout.flush()
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    os._exit(1)
